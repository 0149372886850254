#include "program.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

#include "linear.h"

namespace penstock {

namespace {

constexpr size_t CHUNK_ROWS = 8;
constexpr unsigned MOST_THREADS = 1024;

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

unsigned checked_threads(unsigned threads) {
  require(threads >= 1 && threads <= MOST_THREADS, "threads must be between 1 and 1024; got " + std::to_string(threads));
  return threads;
}

std::vector<QueryTile> query_tiles(const Batch& batch, std::vector<QueryTile> tiles) {
  tiles.clear();
  for (size_t row = 0; row < batch.rows; ++row) {
    const size_t last = size_t(batch.row_start[row + 1]);
    for (size_t first = size_t(batch.row_start[row]); first < last; first += QUERY_TILE)
      tiles.push_back({row, first, std::min(QUERY_TILE, last - first)});
  }
  return tiles;
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

Program::Program(const std::string& isa, unsigned threads, bool half_kv)
    : isa_(choose(isa)),
      pool_(checked_threads(threads)),
      cache_(half_kv),
      frame_{.batch = {},
             .kernels = *isa_.kernels,
             .cache = cache_,
             .buffers = buffers_,
             .tiles = {},
             .scratch = std::vector<Memory>(threads),
             .workers = threads} {}

// ---- building ----

int Program::buffer(const std::string& symbol, size_t width, bool coded) {
  require(symbol == "T" || symbol == "S", "a buffer's symbol is T or S; got " + symbol);
  require(width >= 1 && width <= INT32_MAX, "a buffer's width must be between 1 and 2^31 - 1");
  require(!coded || width % BLOCK == 0, "a quantized row needs a multiple of 32 values; got " + std::to_string(width));
  buffers_.push_back({symbol == "T" ? Symbol::T : Symbol::S, width, coded, {}, {}});
  return int(buffers_.size()) - 1;
}

const Buffer& Program::at(int buffer) const {
  require(buffer >= 0 && size_t(buffer) < buffers_.size(), "no buffer " + std::to_string(buffer));
  return buffers_[size_t(buffer)];
}

const Buffer& Program::at(int buffer, Symbol symbol, size_t width) const {
  const Buffer& found = at(buffer);
  require(found.symbol == symbol, "buffer " + std::to_string(buffer) + " has rows of the other kind");
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
      if (buffer.coded) frame.kernels.quantize(buffer.row(r), buffer.width, buffer.code_row(r));
    }
  };
  phases_.push_back({chunks, run});
}

void Program::quantize(int buffer) {
  if (at(buffer).coded) each_row(buffer, [](const Frame&, size_t) {});
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

void Program::embed(std::shared_ptr<const Weight> table, int out) {
  at(out, Symbol::T, table->width());
  vocab_ = vocab_ ? std::min(vocab_, table->rows()) : table->rows();
  each_row(out, [table, out](const Frame& frame, size_t r) {
    table->read_row(size_t(frame.batch.tokens[r]), frame.buffers[size_t(out)].row(r));
  });
}

void Program::add_norm(int x, std::optional<int> residual, std::vector<float> gain, float eps, int out,
                       std::optional<int> total) {
  const Buffer& from = at(x);
  at(out, from.symbol, from.width);
  require(gain.size() == from.width, "a norm has one gain for each value");
  require(residual.has_value() == total.has_value(), "a residual is added to give a total");
  require(out != x && (!total || (out != *total && out != *residual)), "a norm's result needs a buffer of its own");
  for (const auto& buffer : {residual, total})
    if (buffer) at(*buffer, from.symbol, from.width);
  each_row(out, [=, gain = std::move(gain)](const Frame& frame, size_t r) {
    const auto row = [&](int buffer) { return frame.buffers[size_t(buffer)].row(r); };
    frame.kernels.add_norm(row(x), residual ? row(*residual) : nullptr, gain.data(), eps, gain.size(),
                           total ? row(*total) : nullptr, row(out));
  });
  if (total) quantize(*total);
}

void Program::linear(int x, std::shared_ptr<const Weight> weight, int out) {
  const Buffer& from = at(x);
  require(from.width == weight->width(), "the weight takes rows of " + std::to_string(weight->width()) +
                                             " values; got " + std::to_string(from.width));
  require(from.coded || !weight->coded(), "a quantized weight needs a coded buffer");
  require(x != out, "a product needs a buffer of its own");
  at(out, from.symbol, weight->rows());
  phases_.push_back(linear_phase(x, std::move(weight), out));
  quantize(out);
}

void Program::attend(int qkv, const Attention& attention, int out) {
  const auto& a = attention;
  require(a.heads >= 1 && a.kv_heads >= 1 && a.heads <= 65536 && a.heads % a.kv_heads == 0,
          "attention needs a multiple of its KV heads as heads");
  require(a.dim >= 2 && a.dim <= 65536 && a.dim % 2 == 0, "a head needs an even number of values");
  require(qkv != out, "attention needs a buffer of its own");
  at(qkv, Symbol::T, a.width());
  at(out, Symbol::T, a.heads * a.dim);
  require(at(a.angles).symbol == Symbol::T && at(a.angles).width <= a.dim, "more rotated pairs than a head holds");
  cache_.add_layer(a.layer, a.shape());
  scratch_floats_ = std::max(scratch_floats_, a.scratch_floats());
  longest_window_ = std::max(longest_window_, a.window);
  sees_everything_ |= a.window == 0;
  phases_.push_back(store_phase(a, qkv));
  phases_.push_back(attend_phase(a, qkv, out));
  quantize(out);
}

void Program::gate(int x, int out) {
  const Buffer& to = at(out);
  at(x, to.symbol, 2 * to.width);
  each_row(out, [x, out](const Frame& frame, size_t r) {
    const Buffer& to = frame.buffers[size_t(out)];
    frame.kernels.gate(frame.buffers[size_t(x)].row(r), to.width, to.row(r));
  });
}

void Program::take_sampled(int x, int out) {
  const Buffer& to = at(out, Symbol::S, at(x).width);
  at(x, Symbol::T, to.width);
  each_row(out, [x, out](const Frame& frame, size_t r) {
    const Buffer& from = frame.buffers[size_t(x)];
    std::copy_n(from.row(size_t(frame.batch.sampled[r])), from.width, frame.buffers[size_t(out)].row(r));
  });
}

void Program::answer(int buffer) {
  at(buffer);
  require(answer_ < 0, "the program has an answer already");
  answer_ = buffer;
  for (auto& phase : sampler_.phases(buffer)) phases_.push_back(std::move(phase));
}

// ---- running ----

void Program::reserve_kv(size_t blocks, size_t block_size) {
  const std::lock_guard lock(running_);
  cache_.reserve(blocks, block_size);
}

void Program::copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  const std::lock_guard lock(running_);
  cache_.copy(pairs);
}

void Program::check(const Batch& batch) const {
  const auto tokens = int32_t(batch.tokens_count);
  require(cache_.blocks() || !cache_.layers(), "there is no KV cache yet: reserve it before the first step");
  require(batch.row_start[0] == 0 && batch.row_start[batch.rows] == tokens, "row_start must run from 0 to the tokens");
  for (size_t i = 0; i < batch.tokens_count; ++i)
    require(batch.tokens[i] >= 0 && size_t(batch.tokens[i]) < vocab_,
            "token id " + std::to_string(batch.tokens[i]) + " is outside the vocabulary of " + std::to_string(vocab_));
  for (size_t i = 0; i < batch.sampled_count; ++i)
    require(batch.sampled[i] >= 0 && batch.sampled[i] < tokens, "sampled must index the step's tokens");
  for (size_t row = 0; row < batch.rows; ++row) check_row(batch, row);
}

void Program::check_row(const Batch& batch, size_t row) const {
  const int32_t first = batch.row_start[row], last = batch.row_start[row + 1];
  require(first <= last && last <= batch.row_start[batch.rows], "row_start must not decrease");
  if (first == last || !cache_.layers()) return;
  const auto [lowest, highest] = std::minmax_element(batch.positions + first, batch.positions + last);
  require(*lowest >= 0 && size_t(*highest) / cache_.block_size() < batch.table_width,
          "position " + std::to_string(*lowest < 0 ? *lowest : *highest) + " is outside the row's block table");
  const size_t seen = size_t(*lowest) + 1;
  const size_t needed = sees_everything_ || seen <= longest_window_ ? 0 : seen - longest_window_;
  const int32_t* table = batch.tables + row * batch.table_width;
  for (size_t i = needed / cache_.block_size(); i <= size_t(*highest) / cache_.block_size(); ++i)
    require(table[i] >= 0 && size_t(table[i]) < cache_.blocks(),
            "block " + std::to_string(table[i]) + " is outside the KV cache of " + std::to_string(cache_.blocks()));
}

void Program::grow(size_t tokens, size_t sampled) {
  const size_t rows[2] = {tokens, sampled};
  for (auto& buffer : buffers_) {
    const auto symbol = size_t(buffer.symbol);
    if (rows[symbol] > capacity_[symbol] || !buffer.floats.bytes()) {
      const size_t wanted = std::bit_ceil(std::max(rows[symbol], capacity_[symbol]));
      buffer.floats = Memory(wanted * buffer.width * sizeof(float));
      if (buffer.coded) buffer.codes = Memory(wanted * (buffer.width / BLOCK) * sizeof(CodeBlock));
    }
    buffer.data = buffer.floats.as<float>();
  }
  for (size_t symbol : {0, 1})
    if (rows[symbol] > capacity_[symbol]) capacity_[symbol] = std::bit_ceil(rows[symbol]);
  for (auto& memory : frame_.scratch)
    if (memory.bytes() < scratch_floats_ * sizeof(float)) memory = Memory(scratch_floats_ * sizeof(float));
}

Batch Program::checked(const Step& step) const {
  const auto& [tokens, positions, row_start, tables, table_width, sampled] = step;
  require(answer_ >= 0, "the program has no answer yet");
  require(tokens.size() <= INT32_MAX / 2 && positions.size() == tokens.size(), "every token needs one position");
  require(!row_start.empty() && tables.size() == (row_start.size() - 1) * table_width, "every row needs a block table");
  const Batch batch = {tokens.data(),     positions.data(),     row_start.data(), tables.data(),  sampled.data(),
                       tokens.size(), row_start.size() - 1, table_width,      sampled.size()};
  check(batch);
  return batch;
}

void Program::run(const Step& step, std::span<float> out) {
  const std::lock_guard lock(running_);
  frame_.batch = checked(step);
  require(out.size() == frame_.rows(answer_) * at(answer_).width, "the answer's array has another shape");
  grow(step.tokens.size(), step.sampled.size());
  buffers_[size_t(answer_)].data = out.data();
  sampler_.rest();
  frame_.tiles = query_tiles(frame_.batch, std::move(frame_.tiles));
  pool_.run(StepJob(phases_, frame_));
}

Answers Program::sample(const Step& step, const Draws& draws, const std::vector<Edit>& edits) {
  const std::lock_guard lock(running_);
  frame_.batch = checked(step);
  require(at(answer_).symbol == Symbol::S, "only the logits of sampled positions can be sampled");
  sampler_.prepare(draws, edits, step.sampled.size(), at(answer_).width, pool_.threads());
  grow(step.tokens.size(), step.sampled.size());
  frame_.tiles = query_tiles(frame_.batch, std::move(frame_.tiles));
  pool_.run(StepJob(phases_, frame_));
  return {sampler_.tokens(), sampler_.logprobs()};
}

}  // namespace penstock
