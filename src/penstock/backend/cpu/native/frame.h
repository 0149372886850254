// Defines the input of phases while a step runs.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "adapters.h"
#include "cache.h"
#include "formats.h"
#include "kernels.h"
#include "memory.h"
#include "states.h"

namespace penstock {

// One step's arrays after they were checked. Row r owns tokens row_start[r] to row_start[r + 1].
struct Batch {
  const int32_t* tokens;     // [T]
  const int32_t* positions;  // [T]
  const int32_t* row_start;  // [R + 1]
  const int32_t* tables;     // [layer groups][R][table_width]; entries behind a group's window are not read
  const int32_t* sampled;    // [S]
  size_t tokens_count, rows, table_width, sampled_count;
};

enum class Symbol : uint8_t { T, S };  // tokens of the step; those whose logits are wanted

struct Buffer {
  Symbol symbol;
  size_t width;
  bool prepared;         // its rows are kept in the forms that products ask for, too
  bool coded = false;    // as CodeBlocks
  bool bfloat = false;   // as BF16
  Memory floats = {};    // [rows][width]
  Memory codes = {};     // [rows][code stride]
  Memory bfloats = {};   // [rows][bfloat stride], of which whole blocks are filled
  float* data = nullptr;

  float* row(size_t r) const { return data + r * width; }
  // Where logits come from, codes are spent on the range that a block has: an eighth less divergence from exact logits
  // for a hundredth of a step's time. For all products it would be a half, and a tenth.
  bool middles() const { return symbol == Symbol::S; }
  CodeBlock* code_row(size_t r) const { return codes.as<CodeBlock>() + r * code_stride(); }
  uint16_t* bfloat_row(size_t r) const { return bfloats.as<uint16_t>() + r * bfloat_stride(); }
  // Rows are an odd number of cache lines apart: the same place of many rows must not fall into one set of a cache.
  size_t code_stride() const { return width / BLOCK | 1; }
  size_t bfloat_stride() const { return ((width + BLOCK - 1) / BLOCK | 1) * BLOCK; }

  void make_room(size_t rows) {
    floats = Memory(rows * width * sizeof(float));
    if (coded) codes = Memory(rows * code_stride() * sizeof(CodeBlock));
    if (bfloat) bfloats = Memory(rows * bfloat_stride() * sizeof(uint16_t));
    data = floats.as<float>();
  }
  void prepare(const Kernels& kernels, size_t r) const {
    if (coded) kernels.quantize(row(r), width, middles(), code_row(r));
    if (bfloat) kernels.to_bfloats(row(r), width, bfloat_row(r));
  }
};

// Up to 16 tokens of one row, which attend together.
struct QueryTile {
  size_t row, first, count;
  size_t splits;  // parts of the positions that they see
  size_t end;     // the place after the last one of their row, where attention is not causal; else 0
};

// Work for one worker: a tile over all positions that it sees or, where these are many, over one split of them.
struct WorkItem {
  size_t tile;
  size_t split, splits;  // the first split, and how many
};

// Scores of positions by the index of sparse attention, while positions are selected.
struct IndexScores {
  size_t width = 0;     // places of the longest context of the step, in whole tiles
  bool by_token = false;  // `scores` has a row per token, which workers share; else per worker
  Memory scores = {};      // [tokens or workers][width]
  Memory candidates = {};  // [workers][width] positions
};

struct Frame {
  Batch batch;
  const Kernels& kernels;
  const Cache& cache;
  const States& states;
  const std::vector<Buffer>& buffers;
  std::vector<QueryTile> tiles;
  std::vector<WorkItem> work_items;
  std::vector<size_t> split_tiles;   // the first work items of those tiles that have several
  Memory partials;                   // [work item][group of heads] partial results, where a tile has several
  IndexScores index;                 // models that select positions
  std::vector<RowState> row_states;  // models with recurrent layers
  std::vector<Memory> scratch;       // one for each worker
  unsigned workers;
  std::vector<AdapterRun> adapter_runs[2] = {};  // all tokens, tokens whose logits are wanted
  Memory ranks = {};                             // [rows][rank_stride]: what the thin matrices `a` make of rows
  size_t rank_stride = 0;
  size_t hidden_group = 0;  // the layer group whose blocks hidden states are stored in

  float* rank_row(size_t row) const { return ranks.as<float>() + row * rank_stride; }

  // The block table of a row's sequence for the group that the layer is in.
  const int32_t* table(size_t layer, size_t row) const {
    return batch.tables + (cache.group(layer) * batch.rows + row) * batch.table_width;
  }
  size_t rows(int buffer) const {
    return buffers[size_t(buffer)].symbol == Symbol::T ? batch.tokens_count : batch.sampled_count;
  }
};

// One phase of a step. Its chunks may run in any order and on any worker.
struct Phase {
  std::function<size_t(const Frame&)> chunks;
  std::function<void(const Frame&, size_t chunk, unsigned worker)> run;
};

}  // namespace penstock
