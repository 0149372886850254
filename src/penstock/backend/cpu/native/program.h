// Holds a model's forward pass as a flat list of phases over buffers. It is built once and runs once per step.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "delta.h"
#include "dispatch.h"
#include "experts.h"
#include "frame.h"
#include "hidden_rows.h"
#include "mamba2.h"
#include "pool.h"
#include "sample.h"
#include "scan.h"
#include "select.h"
#include "weights.h"

namespace penstock {

// One step's arrays, before they are checked.
struct Step {
  Ints tokens;  // LAST_SAMPLED: the token that the row's slot sampled last
  Ints positions, row_start, slots;
  Ints tables;  // [groups][rows][table_width]
  size_t groups, table_width;
  Ints sampled;
};

inline constexpr int32_t LAST_SAMPLED = -1;

struct Answers {
  std::vector<int32_t> tokens;     // one per sampled position
  std::vector<Logprob> logprobs;  // one per request for them
};

struct NormedRuns {
  std::vector<float> gain;
  size_t width;  // all runs with this gain; 0: the rest of the row
};

using Gate = void (*)(const float* x, size_t hidden, float* out);

class Program {
 public:
  // A second program runs on the first one's threads, one program at a time, and shares its hidden states.
  Program(const std::string& isa, unsigned threads, const std::string& kv, const Program* beside = nullptr);

  // Building. Buffers are named by numbers. Widths and symbols are checked here, once.
  int buffer(const std::string& symbol, size_t width, bool prepared);
  bool prepares(const Weight& weight) const;  // its products take rows of a prepared buffer
  int angles(std::vector<double> inv_freq, double scale);  // a buffer of cosines and sines, filled every step
  void embed(std::shared_ptr<const Weight> table, int out, bool partial);  // partial: tokens beyond take its first row
  void add_norm(int x, std::optional<int> residual, std::vector<float> gain, float eps, int out,
                std::optional<int> total);
  void linear(int x, std::shared_ptr<const Weight> weight, int out, bool gated);
  void attend(int qkv, const Attention& attention, int out);
  // Norms runs of each part of a row, which are as long as its gain. What follows all parts stays as it is.
  void norm_runs(int x, std::vector<NormedRuns> parts, float eps, int out);
  // Computes layer norms of q and k, of `dim` values at a time. Gains have a value for each of theirs.
  void layer_norm_heads(int x, std::vector<float> q_gain, const std::vector<float>& k_gain, size_t dim, float eps,
                        int out);
  void act_and_mul(int x, int out, const std::string& act);
  void sparse_act_and_mul(int x, int out, const std::string& act, float cutoff);
  void gate_columns(int x, int y, size_t first, int out, const std::string& act);
  void take_columns(int x, size_t first, std::vector<float> gain, int out);  // no gain: as they are
  void concat(int x, int y, int out);
  void match_rms(int x, int like, int out);
  void mix_streams(int x, int coefficients, int out);
  void correct_streams(int x, int fresh, int coefficients, size_t active, int out);
  void add_to_streams(int x, int y, int out);
  void add(int x, int y, int out);
  void scale(int x, float factor, int out);
  void soft_cap(int x, float cap, int out);  // cap * tanh(x / cap)
  void take_sampled(int x, int out);
  void add_layer_norm(int x, std::optional<int> residual, std::vector<float> gain, std::vector<float> bias, float eps,
                      int out, std::optional<int> total);
  void activate(int x, int out, const std::string& act);
  void embed_positions(std::shared_ptr<const Weight> table, int out);
  void sigmoid_mul(int x, int gate, int out);  // x * sigmoid(gate), one for each row or for each value
  // Reads the first columns of `qkv` and `beta` and the last ones of `z` and `alpha`; two may be the same buffer.
  void delta_net(const DeltaBuffers& given, const DeltaShape& shape, ConvVectors conv, DeltaVectors vectors, int mixed,
                 int out);
  // Of the first columns of x or, given a buffer for them, of b * u for rows [b, c, u] of x: then out is c * that.
  void causal_conv(int x, const ConvShape& shape, ConvVectors vectors, std::optional<int> product, int out);
  void selective_scan(const ScanBuffers& buffers, const ScanShape& shape, ScanVectors vectors);
  void mamba2(int zxbcdt, const Mamba2Shape& shape, ConvVectors conv, Mamba2Vectors vectors, int mixed, int out);
  void moe(int x, int router_logits, ExpertWeights weights, Routing routing, const std::string& act, int out);
  // Multiplies each head with its own part of the weight.
  void per_head_linear(int x, std::shared_ptr<const Weight> weight, size_t heads, size_t passthrough, int out);
  void attend_mla(int q, int kv, std::optional<int> selected, const Attention& attention, int out);
  // Writes the positions that attend_mla attends to; `shape` is the layer's KV.
  void select_positions(int q, int k, int weights, const Index& index, KvShape shape, int out);
  // Stores rows, at the positions of their tokens and so many further, where load_hidden finds them.
  void store_hidden(size_t number, int x, size_t ahead);
  void load_hidden(size_t number, int out);
  void keep(int buffer);    // no op added later may write to it, so its rows can be read after a step
  void answer(int buffer);  // the result of a step; no op is added after it
  void read_tokens_as(std::vector<int32_t> ids);  // what each sampled token is as LAST_SAMPLED; empty: the same

  // Without a file, the KV cache and recurrent states are private memory.
  void reserve_kv(size_t blocks, size_t block_size, size_t states, const LayerGroups& groups,
                  MemoryFile* file = nullptr);
  // Takes over the KV cache, recurrent states, last tokens and adapters of a program with the same layers and weights,
  // which cannot run any more.
  void take_over(Program& other);
  void copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs);
  void export_blocks(Blocks blocks, std::span<std::byte> out);
  void import_blocks(Blocks blocks, std::span<const std::byte> data);
  void copy_rows(Blocks blocks, BlockRows& rows, Way way);

  void move_states(std::vector<StateMove> moves);  // takes effect in the next step
  void export_states(Blocks states, std::span<std::byte> out);
  void import_states(Blocks states, std::span<const std::byte> data);
  void load_adapter(size_t slot, std::shared_ptr<const Adapter> adapter);
  void drop_adapter(size_t slot);
  void choose_adapters(std::vector<int32_t> slots);  // one per row of the next step, -1: none
  void run(const Step& step, std::span<float> out);  // runs one step; `out` is [rows of the answer][its width]
  Answers sample(const Step& step, const Draws& draws, const std::vector<Edit>& edits);  // runs a step, samples tokens

  void read_answers(Ints rows, std::span<float> out);  // copies rows of the answer that the last `sample` computed
  void read_kept(size_t first, std::span<float> out);  // fills `out` with rows of the last step

  const std::shared_ptr<HiddenRows>& hidden() const { return hidden_; }
  const std::string& isa() const { return isa_.name; }
  unsigned threads() const { return pool_->threads(); }
  size_t kv_bytes_per_token() const { return cache_.bytes_per_token(); }
  size_t block_bytes() const { return cache_.block_bytes(); }
  std::string kv_layout() const { return cache_.layout(); }
  size_t state_bytes() const { return states_.bytes(); }
  std::string state_layout() const { return states_.layout(); }

 private:
  const Buffer& at(int buffer) const;
  const Buffer& at(int buffer, Symbol symbol, size_t width) const;
  // Adds a phase that calls `row` for each row of `out` and then prepares it.
  void each_row(int out, std::function<void(const Frame&, size_t row)> row);
  // Adds a phase that calls `run` for each row of `out` and each of its equal runs.
  void each_run(int out, size_t runs, std::function<void(const Frame&, size_t row, size_t run)> run);
  void prepare_rows(int buffer);
  void take_rows(int x, const Weight& weight);  // has the rows of x prepared as products with the weight want them
  Gate gate_of(const std::string& act) const;
  Activation activation_of(const std::string& act) const;  // without a gate
  void add_attention(const Attention& attention, int q, int keys, int out);
  bool in_blocks() const { return cache_.layers() || uses_hidden_; }  // something that steps compute
  void check_rows(const Step& step) const;
  void check_tokens() const;
  void check_positions(const Step& step) const;
  void check_context(const Step& step, size_t row) const;
  void check_table(const int32_t* table, size_t first, size_t last) const;
  void know_tokens(const Step& step);
  void remember_tokens(const Step& step, const Draws& draws, const std::vector<int32_t>& tokens);
  void find_states(const Step& step);
  void add_updates(int x, const Weight* weight, int out);
  void gated_linear(int x, std::shared_ptr<const Weight> weight, int out);
  void trellis_linear(int x, std::shared_ptr<const Weight> weight, int out);
  int wide_buffer(Symbol symbol, size_t width);
  int rotated_buffer(Symbol symbol, size_t width);
  void find_adapters(const Step& step);
  static void add_run(std::vector<AdapterRun>& runs, const Adapter* adapter, size_t first, size_t last);
  void grow(size_t tokens, size_t sampled);
  void prepare(const Step& step);

  Isa isa_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<HiddenRows> hidden_;  // shared with other programs
  Cache cache_;
  States states_;
  std::vector<StateMove> moves_;
  std::vector<std::shared_ptr<const Adapter>> adapters_;  // index: slot
  std::vector<const Weight*> adaptable_;                  // weights that products have
  std::vector<int> wide_;  // buffers of gated products that adapters change
  int rotated_[2] = {-1, -1};  // buffers of rows that EXL3 weights multiply, by symbol
  std::vector<int32_t> chosen_;
  std::vector<Buffer> buffers_;
  std::vector<Phase> phases_;
  std::vector<std::shared_ptr<ExpertPermutation>> permutations_;
  Frame frame_;
  Sampler sampler_;
  std::vector<int32_t> known_;         // the step's tokens
  std::vector<int32_t> last_sampled_;  // index: slot; as it is read
  std::vector<int32_t> read_as_;       // index: sampled token; empty: unchanged
  std::mutex running_;
  int answer_ = -1, kept_ = -1;
  size_t vocab_ = 0;      // rows of the smallest embedding table
  size_t positions_ = 0;  // rows of the smallest table of positions
  std::vector<size_t> windows_;        // one per attention layer; 0: sees everything before
  std::vector<size_t> group_windows_;  // the longest of each group's layers; 0: one sees everything
  bool causal_ = true;  // all attention
  bool selects_ = false;  // positions, in some layer
  bool uses_hidden_ = false;
  size_t ahead_ = 0;  // how far behind its token a hidden state is stored
  size_t scratch_floats_ = 0, partial_floats_ = 0;
  size_t capacity_[2] = {0, 0};  // rows of the buffers, by symbol
};

}  // namespace penstock
