#include "delta.h"

#include <algorithm>
#include <cmath>

namespace penstock {

namespace {

constexpr size_t RUN = 64;  // tokens whose keys and queries are made ready at once
constexpr float LEAST_SQUARE = 1e-6f;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void make_unit(const float* x, size_t dim, float factor, float* out) {
  float squares = 0;
  for (size_t i = 0; i < dim; ++i) squares += x[i] * x[i];
  const float scale = factor / std::sqrt(squares + LEAST_SQUARE);
  for (size_t i = 0; i < dim; ++i) out[i] = x[i] * scale;
}

// One value head of one row.
class Head {
 public:
  Head(const Frame& frame, const DeltaShape& shape, const DeltaVectors& vectors, size_t row, size_t head)
      : frame_(frame),
        shape_(shape),
        vectors_(vectors),
        head_(head),
        state_(frame.states, frame.row_states[row], shape.layer, head * shape.memory_floats(), shape.memory_floats()) {}

  const StatePart& state() const { return state_; }

  void delta_rule(size_t first, size_t count, const Buffer& mixed, const Buffer& ba, const Buffer& out,
                float* scratch) const {
    float *q = scratch, *k = q + RUN * shape_.k_dim, *decay = k + RUN * shape_.k_dim, *beta = decay + RUN;
    const float root = 1.0f / std::sqrt(float(shape_.k_dim));
    for (size_t i = 0; i < count; ++i) {
      const float* key_head = mixed.row(first + i) + shape_.key_head(head_) * shape_.k_dim;
      make_unit(key_head, shape_.k_dim, root, q + i * shape_.k_dim);
      make_unit(key_head + shape_.k_width(), shape_.k_dim, 1.0f, k + i * shape_.k_dim);
      const float* gates = ba.row(first + i) + head_;
      beta[i] = sigmoid(gates[0]);
      decay[i] = std::exp(vectors_.decay[head_] * softplus(gates[shape_.v_heads] + vectors_.dt[head_]));
    }
    frame_.kernels.delta.delta_rule({.q = q,
                                     .k = k,
                                     .v = mixed.row(first) + 2 * shape_.k_width() + head_ * shape_.v_dim,
                                     .decay = decay,
                                     .beta = beta,
                                     .k_dim = shape_.k_dim,
                                     .v_dim = shape_.v_dim,
                                     .v_stride = mixed.width,
                                     .count = count,
                                     .memory = state_.own(),
                                     .out = out.row(first) + head_ * shape_.v_dim,
                                     .out_stride = out.width});
  }

  // out = rms_norm(out) * gain * silu(z)
  void finish(size_t token, const Buffer& qkvz, const Buffer& out, float* scratch) const {
    float* values = out.row(token) + head_ * shape_.v_dim;
    std::copy_n(qkvz.row(token) + shape_.width() + head_ * shape_.v_dim, shape_.v_dim, scratch);
    frame_.kernels.add_norm(values, nullptr, vectors_.gain.data(), vectors_.eps, shape_.v_dim, nullptr,
                            scratch + shape_.v_dim);
    frame_.kernels.gate(scratch, shape_.v_dim, values);
  }

 private:
  const Frame& frame_;
  const DeltaShape& shape_;
  const DeltaVectors& vectors_;
  size_t head_;
  StatePart state_;
};

}  // namespace

size_t DeltaShape::scratch_floats() const {
  return std::max({RUN * 2 * (k_dim + 1), 2 * v_dim, conv().kept_floats()});
}

Phase delta_rule_phase(const DeltaShape& shape, std::shared_ptr<const DeltaVectors> vectors, int qkvz, int mixed, int ba,
                     int out) {
  const size_t parts = shape.v_heads + 1;
  const auto chunks = [parts](const Frame& frame) { return frame.batch.rows * parts; };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned worker) {
    const auto buffer = [&](int index) -> const Buffer& { return frame.buffers[size_t(index)]; };
    float* scratch = frame.scratch[worker].as<float>();
    const size_t row = chunk / parts, part = chunk % parts;
    const auto first = size_t(frame.batch.row_start[row]), last = size_t(frame.batch.row_start[row + 1]);
    if (first == last) return;
    if (part == shape.v_heads) return keep_last(frame, shape.conv(), qkvz, row, scratch);
    const Head head(frame, shape, *vectors, row, part);
    head.state().walk(first, last, RUN, [&](size_t token, size_t count) {
      head.delta_rule(token, count, buffer(mixed), buffer(ba), buffer(out), scratch);
    });
    for (size_t token = first; token < last; ++token) head.finish(token, buffer(qkvz), buffer(out), scratch);
  };
  return {chunks, run};
}

}  // namespace penstock
