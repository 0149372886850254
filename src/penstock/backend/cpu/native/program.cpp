#include "program.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <utility>

#include "linear.h"
#include "require.h"

namespace penstock {

namespace {

constexpr size_t CHUNK_ROWS = 8;
constexpr size_t SOFT_CAP_CHUNK = 8192;  // values of a row for one worker
constexpr unsigned MAX_THREADS = 1024;
constexpr int32_t MAX_SLOTS = 1 << 20;

unsigned checked_threads(unsigned threads) {
  require(threads >= 1 && threads <= MAX_THREADS, "threads must be between 1 and 1024; got " + std::to_string(threads));
  return threads;
}

class StepJob final : public Job {
 public:
  StepJob(const std::vector<Phase>& phases, const Frame& frame) : phases_(phases), frame_(frame) {}
  size_t phases() const override { return phases_.size(); }
  uint32_t chunks(size_t phase) const override { return uint32_t(phases_[phase].chunks(frame_)); }
  void run(size_t phase, uint32_t chunk, unsigned worker) const noexcept override {
    phases_[phase].run(frame_, chunk, worker);
  }

 private:
  const std::vector<Phase>& phases_;
  const Frame& frame_;
};

}  // namespace

Program::Program(const std::string& isa, unsigned threads, const std::string& kv, const Program* beside)
    : isa_(choose(isa)),
      pool_(beside ? beside->pool_ : std::make_shared<Pool>(checked_threads(threads))),
      hidden_(beside ? beside->hidden_ : std::make_shared<HiddenRows>()),
      cache_(kv),
      frame_{.batch = {},
             .kernels = *isa_.kernels,
             .cache = cache_,
             .states = states_,
             .buffers = buffers_,
             .tiles = {},
             .work_items = {},
             .split_tiles = {},
             .partials = {},
             .index = {},
             .row_states = {},
             .scratch = std::vector<Memory>(pool_->threads()),
             .workers = pool_->threads()} {}

// ---- building ----

int Program::buffer(const std::string& symbol, size_t width, bool prepared) {
  require(symbol == "T" || symbol == "S", "a buffer's symbol is T or S; got " + symbol);
  require(width >= 1 && width <= INT32_MAX, "a buffer's width must be between 1 and 2^31 - 1");
  buffers_.push_back({.symbol = symbol == "T" ? Symbol::T : Symbol::S, .width = width, .prepared = prepared});
  return int(buffers_.size()) - 1;
}

bool Program::prepares(const Weight& weight) const {
  return weight.coded() || (weight.bfloat() && isa_.kernels->to_bfloats);
}

const Buffer& Program::at(int buffer) const {
  require(buffer >= 0 && size_t(buffer) < buffers_.size(), "no buffer " + std::to_string(buffer));
  return buffers_[size_t(buffer)];
}

const Buffer& Program::at(int buffer, Symbol symbol, size_t width) const {
  const Buffer& found = at(buffer);
  require(found.symbol == symbol, "buffer " + std::to_string(buffer) + " has rows for " +
                                      (symbol == Symbol::T ? "sampled positions, not for all tokens"
                                                           : "all tokens, not for sampled positions"));
  require(found.width == width, "buffer " + std::to_string(buffer) + " is " + std::to_string(found.width) +
                                    " wide where " + std::to_string(width) + " is needed");
  return found;
}

void Program::each_row(int out, std::function<void(const Frame&, size_t row)> row) {
  const auto chunks = [out](const Frame& frame) { return (frame.rows(out) + CHUNK_ROWS - 1) / CHUNK_ROWS; };
  const auto run = [out, row = std::move(row)](const Frame& frame, size_t chunk, unsigned) {
    const Buffer& buffer = frame.buffers[size_t(out)];
    const size_t last = std::min((chunk + 1) * CHUNK_ROWS, frame.rows(out));
    for (size_t r = chunk * CHUNK_ROWS; r < last; ++r) {
      row(frame, r);
      buffer.prepare(frame.kernels, r);
    }
  };
  phases_.push_back({chunks, run});
}

void Program::prepare_rows(int buffer) {
  if (at(buffer).prepared) each_row(buffer, [](const Frame&, size_t) {});
}

int Program::angles(std::vector<double> inv_freq, double scale) {
  require(!inv_freq.empty(), "a rotation needs at least one frequency");
  const int out = buffer("T", 2 * inv_freq.size(), false);
  each_row(out, [out, inv_freq = std::move(inv_freq), scale](const Frame& frame, size_t r) {
    float* cos = frame.buffers[size_t(out)].row(r);
    float* sin = cos + inv_freq.size();
    for (size_t i = 0; i < inv_freq.size(); ++i) {
      const double angle = frame.batch.positions[r] * inv_freq[i];
      cos[i] = float(std::cos(angle) * scale);
      sin[i] = float(std::sin(angle) * scale);
    }
  });
  return out;
}

void Program::embed(std::shared_ptr<const Weight> table, int out, bool partial) {
  at(out, Symbol::T, table->width());
  require_panels(*table);
  if (!partial) vocab_ = vocab_ ? std::min(vocab_, table->rows()) : table->rows();
  each_row(out, [table, out](const Frame& frame, size_t r) {
    const auto token = size_t(frame.batch.tokens[r]);
    table->read_row(token < table->rows() ? token : 0, frame.buffers[size_t(out)].row(r));
  });
}

void Program::add_norm(int x, std::optional<int> residual, std::vector<float> gain, float eps, int out,
                       std::optional<int> total) {
  const Buffer& from = at(x);
  at(out, from.symbol, from.width);
  require(gain.size() == from.width, "a norm has one gain for each value");
  require(residual.has_value() == total.has_value(), "a residual is added to give a total");
  require(out != x && (!total || (out != *total && out != *residual)), "a norm cannot write to a buffer that it reads");
  for (const auto& buffer : {residual, total})
    if (buffer) at(*buffer, from.symbol, from.width);
  each_row(out, [=, gain = std::move(gain)](const Frame& frame, size_t r) {
    const auto row = [&](int buffer) { return frame.buffers[size_t(buffer)].row(r); };
    frame.kernels.add_norm(row(x), residual ? row(*residual) : nullptr, gain.data(), eps, gain.size(),
                           total ? row(*total) : nullptr, row(out));
  });
  if (total) prepare_rows(*total);
}

void Program::take_rows(int x, const Weight& weight) {
  Buffer& from = buffers_[size_t(x)];
  require(from.prepared || !prepares(weight), "this weight needs a prepared buffer");
  from.coded |= weight.coded();
  from.bfloat |= weight.bfloat() && isa_.kernels->to_bfloats;
}

void Program::linear(int x, std::shared_ptr<const Weight> weight, int out, bool gated) {
  const Buffer& from = at(x);
  require(from.width == weight->width(), "the weight takes rows of " + std::to_string(weight->width()) +
                                             " values; got " + std::to_string(from.width));
  require(x != out, "a product cannot write to the buffer that it reads");
  require(!gated || weight->gateable(),
          "a gated product needs a weight of two equal halves of one quantized format, without a bias");
  at(out, from.symbol, gated ? weight->rows() / 2 : weight->rows());
  take_rows(x, *weight);
  adaptable_.push_back(weight.get());
  if (weight->trellis()) return trellis_linear(x, std::move(weight), out);
  if (gated) return gated_linear(x, std::move(weight), out);
  const Weight* key = weight.get();
  phases_.push_back(linear_phase(x, std::move(weight), out, false));
  add_updates(x, key, out);
  prepare_rows(out);
}

void Program::norm_runs(int x, std::vector<NormedRuns> parts, float eps, int out) {
  const Buffer& from = at(x);
  at(out, from.symbol, from.width);
  size_t normed = 0;
  for (auto& [gain, width] : parts) {
    if (!width) width = from.width - normed;
    require(!gain.empty() && width % gain.size() == 0, "what is normed must be as wide as a multiple of its gain");
    normed += width;
  }
  require(normed <= from.width, "more values are normed than a row has");
  each_row(out, [=, parts = std::move(parts)](const Frame& frame, size_t r) {
    const Buffer& to = frame.buffers[size_t(out)];
    const float* row = frame.buffers[size_t(x)].row(r);
    size_t i = 0;
    for (const auto& [gain, width] : parts)
      for (const size_t end = i + width; i < end; i += gain.size())
        frame.kernels.add_norm(row + i, nullptr, gain.data(), eps, gain.size(), nullptr, to.row(r) + i);
    if (x != out) std::copy(row + normed, row + to.width, to.row(r) + normed);
  });
}

Gate Program::gate_of(const std::string& act) const {
  const std::pair<const char*, Gate> gates[] = {
      {"silu", isa_.kernels->gate},
      {"gelu", isa_.kernels->gelu_gate},
      {"gelu_tanh", isa_.kernels->gelu_tanh_gate},
      {"clamped", isa_.kernels->clamped_gate}};
  for (const auto& [name, gate] : gates)
    if (act == name) return gate;
  throw std::invalid_argument("no activation " + act);
}

void Program::act_and_mul(int x, int out, const std::string& act) {
  const Buffer& to = at(out);
  at(x, to.symbol, 2 * to.width);
  const Gate gate = gate_of(act);
  each_row(out, [x, out, gate](const Frame& frame, size_t r) {
    const Buffer& to = frame.buffers[size_t(out)];
    gate(frame.buffers[size_t(x)].row(r), to.width, to.row(r));
  });
}

void Program::add(int x, int y, int out) {
  const Buffer& to = at(out);
  at(x, to.symbol, to.width);
  at(y, to.symbol, to.width);
  each_row(out, [x, y, out](const Frame& frame, size_t r) {
    const auto row = [&](int buffer) { return frame.buffers[size_t(buffer)].row(r); };
    std::transform(row(x), row(x) + frame.buffers[size_t(out)].width, row(y), row(out), std::plus<>());
  });
}

void Program::scale(int x, float factor, int out) {
  const Buffer& to = at(out);
  at(x, to.symbol, to.width);
  each_row(out, [x, factor, out](const Frame& frame, size_t r) {
    const Buffer& to = frame.buffers[size_t(out)];
    if (x != out) std::copy_n(frame.buffers[size_t(x)].row(r), to.width, to.row(r));
    frame.kernels.scale(to.row(r), to.width, factor);
  });
}

// A few rows of logits are much work for one worker, so rows are divided too.
void Program::soft_cap(int x, float cap, int out) {
  const Buffer& to = at(out);
  at(x, to.symbol, to.width);
  require(cap > 0, "a soft cap is above 0");
  const size_t pieces = (to.width + SOFT_CAP_CHUNK - 1) / SOFT_CAP_CHUNK;
  phases_.push_back({[=](const Frame& frame) { return frame.rows(out) * pieces; },
                     [=](const Frame& frame, size_t chunk, unsigned) {
                       const Buffer& to = frame.buffers[size_t(out)];
                       const size_t r = chunk / pieces, first = chunk % pieces * SOFT_CAP_CHUNK;
                       const size_t count = std::min(SOFT_CAP_CHUNK, to.width - first);
                       if (x != out) std::copy_n(frame.buffers[size_t(x)].row(r) + first, count, to.row(r) + first);
                       frame.kernels.soft_cap(to.row(r) + first, count, cap);
                     }});
  prepare_rows(out);
}

void Program::take_sampled(int x, int out) {
  const Buffer& to = at(out, Symbol::S, at(x).width);
  at(x, Symbol::T, to.width);
  each_row(out, [x, out](const Frame& frame, size_t r) {
    const Buffer& from = frame.buffers[size_t(x)];
    std::copy_n(from.row(size_t(frame.batch.sampled[r])), from.width, frame.buffers[size_t(out)].row(r));
  });
}

void Program::moe(int x, int router_logits, ExpertWeights weights, Routing routing, const std::string& act, int out) {
  weights.check();
  routing.check();
  require(weights.up.size() == routing.count, "every expert needs weights");
  at(x, Symbol::T, weights.width());
  at(router_logits, Symbol::T, routing.count);
  at(out, Symbol::T, weights.width());
  require(out != x && out != router_logits, "experts cannot write to a buffer that they read");
  for (const auto& weight : weights.up) take_rows(x, *weight);
  scratch_floats_ = std::max(scratch_floats_, routing.scratch_floats());
  auto permutation = std::make_shared<ExpertPermutation>(routing, weights, *isa_.kernels);
  const auto shared = std::find_if(permutations_.begin(), permutations_.end(),
                                   [&](const auto& other) { return other->same_shape(*permutation); });
  if (shared == permutations_.end())
    permutations_.push_back(permutation);
  else
    permutation = *shared;
  const bool fused = act == "silu" && weights.gated() && weights.gateable();
  const Activation gate = fused ? nullptr : weights.gated() ? gate_of(act) : activation_of(act);
  const auto moe = std::make_shared<const Moe>(
      Moe{x, router_logits, std::move(routing), std::move(weights), gate, std::move(permutation)});
  for (auto& phase : expert_phases(moe)) phases_.push_back(std::move(phase));
  each_row(out, [moe, out](const Frame& frame, size_t r) { moe->add_up(r, frame.buffers[size_t(out)].row(r)); });
}

void Program::keep(int buffer) {
  require(at(buffer).symbol == Symbol::T, "rows are kept for every token of a step");
  require(kept_ < 0, "the program keeps a buffer already");
  kept_ = buffer;
}

void Program::answer(int buffer) {
  at(buffer);
  require(answer_ < 0, "the program has an answer already");
  require(buffer != kept_, "an answer needs a buffer of its own, because it is written to memory of the caller");
  answer_ = buffer;
  for (auto& phase : sampler_.phases(buffer)) phases_.push_back(std::move(phase));
}

// ---- running ----

void Program::reserve_kv(size_t blocks, size_t block_size, size_t states, const LayerGroups& groups,
                         MemoryFile* file) {
  const std::lock_guard lock(running_);
  cache_.reserve(blocks, block_size, groups, file);
  states_.reserve(states, file);
  group_windows_.assign(cache_.groups(), 1);
  for (size_t layer = 0; layer < windows_.size(); ++layer) {
    size_t& window = group_windows_[cache_.group(layer)];
    window = longer_window(window, windows_[layer]);
  }
  const auto whole = std::find(group_windows_.begin(), group_windows_.end(), size_t(0));
  frame_.hidden_group = whole == group_windows_.end() ? 0 : size_t(whole - group_windows_.begin());
}

void Program::take_over(Program& other) {
  const std::scoped_lock lock(running_, other.running_);
  require(this != &other && answer_ >= 0 && pool_ == other.pool_, "a program takes over from another, beside it");
  require(cache_.same_layers(other.cache_) && states_.same_layers(other.states_) && windows_ == other.windows_,
          "a program takes over from one whose layers keep the same");
  require(uses_hidden_ == other.uses_hidden_, "a program takes over from one that stores hidden states, or from none");
  require(adaptable_ == other.adaptable_, "a program takes over from one that has the same weights");
  std::swap(cache_, other.cache_);
  std::swap(states_, other.states_);
  std::swap(group_windows_, other.group_windows_);
  std::swap(frame_.hidden_group, other.frame_.hidden_group);
  std::swap(last_sampled_, other.last_sampled_);
  std::swap(adapters_, other.adapters_);
}

void Program::copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  const std::lock_guard lock(running_);
  cache_.copy(pairs);
}

void Program::export_blocks(Blocks blocks, std::span<std::byte> out) {
  const std::lock_guard lock(running_);
  require(out.size() == blocks.size() * cache_.block_bytes(), "the blocks take another number of bytes");
  cache_.export_blocks(blocks, out.data());
}

void Program::import_blocks(Blocks blocks, std::span<const std::byte> data) {
  const std::lock_guard lock(running_);
  require(data.size() == blocks.size() * cache_.block_bytes(),
          std::to_string(blocks.size()) + " blocks of this KV cache take " +
              std::to_string(blocks.size() * cache_.block_bytes()) + " bytes; got " + std::to_string(data.size()));
  cache_.check_blocks(blocks);
  BlockRows rows;
  auto* const begin = const_cast<std::byte*>(data.data());  // on the way in, rows are only read
  for (size_t at = 0; at < blocks.size(); ++at) rows.begin.push_back(begin + at * cache_.block_bytes());
  pool_->run(RowJob(cache_, blocks, rows, Way::IN));
}

void Program::copy_rows(Blocks blocks, BlockRows& rows, Way way) {
  const std::lock_guard lock(running_);
  cache_.check_blocks(blocks);
  pool_->run(RowJob(cache_, blocks, rows, way));
}

void Program::check_rows(const Step& step) const {
  const auto& starts = step.row_start;
  require(answer_ >= 0, "the program has no answer yet");
  require(cache_.blocks() || !cache_.layers(), "there is no KV cache yet: reserve it before the first step");
  require(!uses_hidden_ || (cache_.blocks() && hidden_->blocks() == cache_.blocks()),
          "there is no room for hidden states yet: reserve it with the KV cache");
  require(step.tokens.size() <= INT32_MAX / 2 && step.positions.size() == step.tokens.size(),
          "every token needs one position");
  require(!starts.empty() && step.tables.size() == step.groups * (starts.size() - 1) * step.table_width,
          "every row needs a block table");
  require(!in_blocks() || step.groups == cache_.groups(),
          "the KV cache has " + std::to_string(cache_.groups()) + " layer groups, the step has block tables for " +
              std::to_string(step.groups));
  require(step.slots.size() == starts.size() - 1, "every row needs a slot");
  require(starts.front() == 0 && starts.back() == int32_t(step.tokens.size()),
          "row_start must begin with 0 and end with the number of tokens");
  require(std::is_sorted(starts.begin(), starts.end()), "row_start must not decrease");
  for (int32_t slot : step.slots) require(slot >= 0 && slot < MAX_SLOTS, "a slot is a number from 0 to 2^20 - 1");
  for (int32_t token : step.sampled)
    require(token >= 0 && size_t(token) < step.tokens.size(), "sampled must index the step's tokens");
}

void Program::check_tokens() const {
  for (int32_t token : known_)
    require(token >= 0 && size_t(token) < vocab_,
            "token id " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(vocab_));
}

void Program::check_positions(const Step& step) const {
  for (int32_t position : step.positions)
    require(!positions_ || (position >= 0 && size_t(position) < positions_),
            "position " + std::to_string(position) + " is outside the model's " + std::to_string(positions_));
}

void Program::check_context(const Step& step, size_t row) const {
  const int32_t first = step.row_start[row], last = step.row_start[row + 1];
  if (first == last || !in_blocks()) return;
  const auto [lowest, highest] = std::minmax_element(step.positions.data() + first, step.positions.data() + last);
  const size_t end = size_t(*highest) + ahead_;
  require(*lowest >= 0 && end / cache_.block_size() < step.table_width,
          "position " + (*lowest < 0 ? std::to_string(*lowest) : std::to_string(end)) +
              " is outside the row's block table");
  const size_t seen = size_t(*lowest) + 1;
  for (size_t group = 0; group < step.groups; ++group) {
    const size_t window = group_windows_[group];
    const size_t first = window && seen > window ? seen - window : 0;
    check_table(step.tables.data() + (group * step.slots.size() + row) * step.table_width, first, end);
  }
}

void Program::check_table(const int32_t* table, size_t first, size_t last) const {
  for (size_t i = first / cache_.block_size(); i <= last / cache_.block_size(); ++i)
    require(table[i] >= 0 && size_t(table[i]) < cache_.blocks(),
            "block " + std::to_string(table[i]) + " is outside the KV cache of " + std::to_string(cache_.blocks()));
}

void Program::know_tokens(const Step& step) {
  known_.assign(step.tokens.begin(), step.tokens.end());
  for (size_t row = 0; row < step.slots.size(); ++row) {
    const auto slot = size_t(step.slots[row]);
    if (slot < last_sampled_.size())
      std::replace(known_.begin() + step.row_start[row], known_.begin() + step.row_start[row + 1], LAST_SAMPLED,
                   last_sampled_[slot]);
  }
}

void Program::read_tokens_as(std::vector<int32_t> ids) {
  require(answer_ >= 0 && (ids.empty() || ids.size() == at(answer_).width),
          "a program reads each of the tokens that it samples as another one, or none of them");
  read_as_ = std::move(ids);
}

void Program::remember_tokens(const Step& step, const Draws& draws, const std::vector<int32_t>& tokens) {
  for (size_t s = 0, row = 0; s < tokens.size(); ++s) {
    while (step.row_start[row + 1] <= step.sampled[s]) ++row;
    const auto slot = size_t(step.slots[row]);
    if (slot >= last_sampled_.size()) last_sampled_.resize(slot + 1, LAST_SAMPLED);
    if (draws.target[s] < 0)
      last_sampled_[slot] = read_as_.empty() || tokens[s] < 0 ? tokens[s] : read_as_[size_t(tokens[s])];
  }
}

void Program::grow(size_t tokens, size_t sampled) {
  const size_t rows[2] = {tokens, sampled};
  for (auto& buffer : buffers_) {
    const auto symbol = size_t(buffer.symbol);
    if (rows[symbol] > capacity_[symbol] || !buffer.floats.bytes())
      buffer.make_room(std::bit_ceil(std::max(rows[symbol], capacity_[symbol])));
    buffer.data = buffer.floats.as<float>();
  }
  for (size_t symbol : {0, 1})
    if (rows[symbol] > capacity_[symbol]) capacity_[symbol] = std::bit_ceil(rows[symbol]);
  for (const auto& permutation : permutations_) permutation->grow(tokens);
  const size_t partials = frame_.split_tiles.empty() ? 0 : frame_.work_items.size() * partial_floats_ * sizeof(float);
  if (frame_.partials.bytes() < partials) frame_.partials = Memory(std::bit_ceil(partials));
  for (auto& memory : frame_.scratch)
    if (memory.bytes() < scratch_floats_ * sizeof(float)) memory = Memory(scratch_floats_ * sizeof(float));
}

void Program::prepare(const Step& step) {
  check_rows(step);
  know_tokens(step);
  check_tokens();
  check_positions(step);
  for (size_t row = 0; row < step.slots.size(); ++row) check_context(step, row);
  frame_.batch = {known_.data(),        step.positions.data(), step.row_start.data(), step.tables.data(),
                  step.sampled.data(), step.tokens.size(),    step.slots.size(),     step.table_width,
                  step.sampled.size()};
  if (cache_.layers()) plan_attention(frame_, causal_);
  if (selects_) plan_index(frame_);
  find_states(step);
  find_adapters(step);
  grow(step.tokens.size(), step.sampled.size());
}

void Program::run(const Step& step, std::span<float> out) {
  const std::lock_guard lock(running_);
  prepare(step);
  require(out.size() == frame_.rows(answer_) * at(answer_).width, "the answer's array has another shape");
  buffers_[size_t(answer_)].data = out.data();
  sampler_.rest();
  pool_->run(StepJob(phases_, frame_));
  buffers_[size_t(answer_)].data = at(answer_).floats.as<float>();  // the caller may free its array
}

void Program::read_kept(size_t first, std::span<float> out) {
  const std::lock_guard lock(running_);
  require(kept_ >= 0, "the program keeps no buffer");
  const Buffer& from = at(kept_);
  const size_t rows = out.size() / from.width, computed = frame_.batch.tokens_count;
  require(rows * from.width == out.size() && first <= computed && rows <= computed - first,
          "the last step has no such rows");
  if (rows) std::copy_n(from.row(first), out.size(), out.begin());
}

void Program::read_answers(Ints rows, std::span<float> out) {
  const std::lock_guard lock(running_);
  const Buffer& from = at(answer_);
  require(out.size() == rows.size() * from.width, "the answer's array has another shape");
  for (size_t i = 0; i < rows.size(); ++i) {
    require(rows[i] >= 0 && size_t(rows[i]) < frame_.rows(answer_), "the last step has no such row");
    std::copy_n(from.row(size_t(rows[i])), from.width, out.data() + i * from.width);
  }
}

Answers Program::sample(const Step& step, const Draws& draws, const std::vector<Edit>& edits) {
  const std::lock_guard lock(running_);
  prepare(step);
  require(at(answer_).symbol == Symbol::S, "only the logits of sampled positions can be sampled");
  sampler_.prepare(draws, edits, step.sampled.size(), at(answer_).width, pool_->threads());
  pool_->run(StepJob(phases_, frame_));
  Answers answers = {sampler_.tokens(), sampler_.logprobs()};
  remember_tokens(step, draws, answers.tokens);
  return answers;
}

}  // namespace penstock
