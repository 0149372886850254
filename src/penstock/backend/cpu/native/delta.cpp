#include "delta.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace penstock {

namespace {

constexpr size_t CONVOLVED_AT_ONCE = 8;  // tokens per chunk
constexpr size_t RUN = 64;               // tokens whose keys and queries are made ready at once
constexpr float LEAST_SQUARE = 1e-6f;

// Inputs of one row's convolution: those of its tokens and, before them, of the state that it begins with.
class Inputs {
 public:
  Inputs(const Frame& frame, const DeltaShape& shape, Columns qkv, size_t row)
      : frame_(frame), qkv_(qkv), first_(size_t(frame.batch.row_start[row])) {
    const RowState& state = frame.row_states[row];
    if (state.begin != NO_STATE)
      before_ = frame.states.at(shape.layer, state.begin) + shape.v_heads * shape.memory_floats();
    conv_width_ = shape.conv_width;
    width_ = shape.width();
  }

  // The one `index` tokens after the row's first; null: there is nothing yet.
  const float* at(ptrdiff_t index) const {
    if (index >= 0) return qkv_.row(frame_, first_ + size_t(index));
    return before_ ? before_ + (ptrdiff_t(conv_width_) - 1 + index) * ptrdiff_t(width_) : nullptr;
  }

  // What was convolved last after so many of the row's tokens.
  void copy_last(size_t tokens, float* out) const {
    for (size_t i = 0; i + 1 < conv_width_; ++i, out += width_) {
      const float* input = at(ptrdiff_t(tokens + i + 1) - ptrdiff_t(conv_width_));
      input ? (void)std::copy_n(input, width_, out) : (void)std::fill_n(out, width_, 0.0f);
    }
  }

 private:
  const Frame& frame_;
  Columns qkv_;
  size_t first_, conv_width_, width_;
  const float* before_ = nullptr;
};

void keep_last(const Frame& frame, const DeltaShape& shape, Columns qkv, size_t row, float* scratch) {
  const RowState& state = frame.row_states[row];
  const Inputs inputs(frame, shape, qkv, row);
  const size_t tokens = size_t(frame.batch.row_start[row + 1] - frame.batch.row_start[row]);
  const size_t offset = shape.v_heads * shape.memory_floats(), count = (shape.conv_width - 1) * shape.width();
  if (state.save != NO_STATE) inputs.copy_last(size_t(state.after), frame.states.at(shape.layer, state.save) + offset);
  inputs.copy_last(tokens, scratch);
  std::copy_n(scratch, count, frame.states.at(shape.layer, state.own) + offset);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void make_unit(const float* x, size_t dim, float factor, float* out) {
  float squares = 0;
  for (size_t i = 0; i < dim; ++i) squares += x[i] * x[i];
  const float scale = factor / std::sqrt(squares + LEAST_SQUARE);
  for (size_t i = 0; i < dim; ++i) out[i] = x[i] * scale;
}

// One value head of one row.
class Head {
 public:
  Head(const Frame& frame, const DeltaShape& shape, const DeltaVectors& vectors, const DeltaInputs& inputs, size_t row,
       size_t head)
      : frame_(frame),
        shape_(shape),
        vectors_(vectors),
        inputs_(inputs),
        state_(frame.row_states[row]),
        head_(head),
        memory_(memory(state_.own)) {}

  void begin() const {
    const size_t count = shape_.memory_floats();
    if (state_.begin == NO_STATE)
      std::fill_n(memory_, count, 0.0f);
    else if (state_.begin != state_.own)
      std::copy_n(memory(state_.begin), count, memory_);
  }

  void save() const { std::copy_n(memory_, shape_.memory_floats(), memory(state_.save)); }

  void delta_rule(size_t first, size_t count, const Buffer& mixed, const Buffer& out, float* scratch) const {
    const size_t k_dim = shape_.k_dim, decays = shape_.decays();
    float *q = scratch, *k = q + RUN * k_dim, *faded = k + RUN * k_dim, *decay = faded + RUN * k_dim;
    float* beta = decay + RUN * decays;
    const float root = 1.0f / std::sqrt(float(k_dim));
    for (size_t i = 0; i < count; ++i) {
      const float* key_head = mixed.row(first + i) + shape_.key_head(head_) * k_dim;
      make_unit(key_head, k_dim, root, q + i * k_dim);
      make_unit(key_head + shape_.k_width(), k_dim, 1.0f, k + i * k_dim);
      beta[i] = sigmoid(inputs_.beta.row(frame_, first + i)[head_]);
      frame_.kernels.delta.decay(inputs_.alpha.row(frame_, first + i) + head_ * decays, &vectors_.dt[head_ * decays],
                                 vectors_.decay[head_], decays, decay + i * decays);
      for (size_t j = 0; j < k_dim; ++j)
        faded[i * k_dim + j] = k[i * k_dim + j] * decay[i * decays + (shape_.channel_decay ? j : 0)];
    }
    frame_.kernels.delta.delta_rule({.q = q,
                                     .k = k,
                                     .faded = faded,
                                     .v = mixed.row(first) + 2 * shape_.k_width() + head_ * shape_.v_dim,
                                     .decay = decay,
                                     .beta = beta,
                                     .channels = shape_.channel_decay,
                                     .k_dim = k_dim,
                                     .v_dim = shape_.v_dim,
                                     .v_stride = mixed.width,
                                     .count = count,
                                     .memory = memory_,
                                     .out = out.row(first) + head_ * shape_.v_dim,
                                     .out_stride = out.width});
  }

  // out = rms_norm(out) * gain * silu(z), or sigmoid(z)
  void finish(size_t token, const Buffer& out, float* scratch) const {
    const float* z = inputs_.z.row(frame_, token) + head_ * shape_.v_dim;
    float *values = out.row(token) + head_ * shape_.v_dim, *normed = scratch + shape_.v_dim;
    frame_.kernels.add_norm(values, nullptr, vectors_.gain.data(), vectors_.eps, shape_.v_dim, nullptr, normed);
    if (shape_.sigmoid_gate) return frame_.kernels.delta.gate_by(normed, z, shape_.v_dim, values);
    std::copy_n(z, shape_.v_dim, scratch);
    frame_.kernels.gate(scratch, shape_.v_dim, values);
  }

 private:
  float* memory(int32_t state) const {
    return frame_.states.at(shape_.layer, state) + head_ * shape_.memory_floats();
  }

  const Frame& frame_;
  const DeltaShape& shape_;
  const DeltaVectors& vectors_;
  const DeltaInputs& inputs_;
  const RowState& state_;
  size_t head_;
  float* memory_;
};

}  // namespace

size_t DeltaShape::scratch_floats() const {
  return std::max({RUN * (3 * k_dim + decays() + 1), 2 * v_dim, (conv_width - 1) * width()});
}

Phase convolve_phase(const DeltaShape& shape, std::shared_ptr<const DeltaVectors> vectors, Columns qkv, int mixed) {
  const auto chunks = [](const Frame& frame) {
    return (frame.batch.tokens_count + CONVOLVED_AT_ONCE - 1) / CONVOLVED_AT_ONCE;
  };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned) {
    const Buffer& out = frame.buffers[size_t(mixed)];
    const int32_t* starts = frame.batch.row_start;
    const size_t last = std::min((chunk + 1) * CONVOLVED_AT_ONCE, frame.batch.tokens_count);
    for (size_t token = chunk * CONVOLVED_AT_ONCE; token < last; ++token) {
      const size_t row = size_t(std::upper_bound(starts, starts + frame.batch.rows + 1, int32_t(token)) - starts) - 1;
      const Inputs inputs(frame, shape, qkv, row);
      const float* seen[MAX_CONV_WIDTH];
      for (size_t tap = 0; tap < shape.conv_width; ++tap)
        seen[tap] = inputs.at(ptrdiff_t(token) - starts[row] + ptrdiff_t(tap + 1) - ptrdiff_t(shape.conv_width));
      frame.kernels.delta.convolve(seen, vectors->conv.data(), shape.conv_width, shape.width(), out.row(token));
    }
  };
  return {chunks, run};
}

Phase delta_rule_phase(const DeltaShape& shape, std::shared_ptr<const DeltaVectors> vectors, const DeltaInputs& inputs,
                       int mixed, int out) {
  const size_t parts = shape.v_heads + 1;
  const auto chunks = [parts](const Frame& frame) { return frame.batch.rows * parts; };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned worker) {
    const auto buffer = [&](int index) -> const Buffer& { return frame.buffers[size_t(index)]; };
    float* scratch = frame.scratch[worker].as<float>();
    const size_t row = chunk / parts, part = chunk % parts;
    const auto first = size_t(frame.batch.row_start[row]), last = size_t(frame.batch.row_start[row + 1]);
    if (first == last) return;
    if (part == shape.v_heads) return keep_last(frame, shape, inputs.qkv, row, scratch);
    const Head head(frame, shape, *vectors, inputs, row, part);
    const RowState& state = frame.row_states[row];
    const size_t saved = state.save == NO_STATE ? last : first + size_t(state.after);
    head.begin();
    for (size_t token = first; token < last;) {
      const size_t count = std::min(RUN, (token < saved ? saved : last) - token);
      head.delta_rule(token, count, buffer(mixed), buffer(out), scratch);
      token += count;
      if (token == saved && state.save != NO_STATE) head.save();
    }
    for (size_t token = first; token < last; ++token) head.finish(token, buffer(out), scratch);
  };
  return {chunks, run};
}

}  // namespace penstock
