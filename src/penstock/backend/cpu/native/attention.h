// Attention over the paged KV cache.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "frame.h"

namespace penstock {

// The options of an attention op by their names in model/spec.py. Flags are 0 or 1.
using Numbers = std::map<std::string, double>;
using Vectors = std::map<std::string, std::vector<float>>;

struct Attention {
  size_t layer, heads, kv_heads, dim;
  size_t window;     // 0: sees everything before
  int angles;        // buffer [T][cos of each pair, sin of each pair]; -1: nothing is rotated
  bool interleaved;  // pairs are (2i, 2i + 1) or (i, i + pairs)
  float scale;
  float soft_cap;  // maximum of scores; 0: none
  bool causal;     // else a token sees its whole row
  bool shares_kv;  // its rows are only queries: another attention writes the layer's keys and values
  size_t chunk = 0;  // above 0: a token sees only its own chunk of this many positions
  double temperature = 0;       // queries are multiplied by 1 + temperature * log(1 + floor((position + 1) / span))
  size_t temperature_span = 1;
  std::vector<float> q_gain = {};  // [dim], what rotated queries are multiplied by; or none
  std::vector<float> sinks = {};   // a score per head that joins the softmax without a value; or none
  std::vector<float> distance_bias = {};  // [heads][distances], what scores get for how far a key is; or none
  size_t v_dim = 0;                // above 0: MLA, whose values are the last dimensions of keys, after a norm
  std::vector<float> gain = {};    // [v_dim]
  float eps = 0;
  size_t index_dim = 0;  // dimensions of index keys; 0: none
  size_t top_k = 0;      // positions that a token attends to; 0: all that it sees

  // The positions that a token sees at most, itself included; 0: no limit.
  size_t reach() const { return window && chunk ? std::min(window, chunk) : window + chunk; }
  // A head's biases are those of distances from 1 - TILE - farthest to farthest + TILE - 1: beyond the farthest they are
  // equal, and a tile of keys finds its own in a row.
  size_t distances() const { return distance_bias.size() / heads; }
  ptrdiff_t farthest() const { return (ptrdiff_t(distances()) + 1) / 2 - ptrdiff_t(TILE); }
  float query_scale(size_t position) const;  // what the scores of a query are multiplied by
  size_t head_groups() const;  // groups of heads that attend together, each to one KV head
  size_t group_heads() const { return heads / head_groups(); }
  size_t kv_head(size_t group) const { return group * kv_heads / head_groups(); }
  size_t value_dim() const { return v_dim ? v_dim : dim; }
  size_t width() const { return (heads + (shares_kv ? 0 : 2 * kv_heads)) * dim; }
  KvShape shape() const;
  size_t scratch_floats() const;  // scratch of one worker
  size_t partial_floats() const;    // the partial result of a tile of queries
};

// The longer of two windows; 0: one of them sees everything.
inline size_t longer_window(size_t one, size_t other) { return one && other ? std::max(one, other) : 0; }

// Throws for an option that it does not know: ignoring one would give wrong answers without a word.
Attention attention_of(size_t layer, int angles, Numbers numbers, Vectors vectors);

inline constexpr size_t QUERY_TILE = 16;

// Positions of one running softmax. The partial results of several splits are merged in order. Splits begin
// at fixed places of a sequence, so the result does not depend on which worker computes them.
inline constexpr size_t SPLIT = 4 * SPAN;

void plan_attention(Frame& frame, bool causal);  // makes the step's tiles and work items

// Rotates keys and writes them and the values: of qkv, or only the keys of MLA.
Phase store_phase(const Attention& attention, int qkv);
Phase attend_phase(const Attention& attention, int qkv, int out);  // runs every work item
Phase merge_phase(const Attention& attention, int out);             // merges the partial results of split tiles
// Attends from those tokens that see more than top_k positions to the ones that were selected.
Phase sparse_phase(const Attention& attention, int q, int selected, int out);

Rotation rotation(const Frame& frame, int angles, bool interleaved, size_t token);  // for a token's position
size_t row_of(const Batch& batch, size_t token);

}  // namespace penstock
