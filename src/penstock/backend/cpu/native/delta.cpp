#include "delta.h"

#include <algorithm>
#include <cmath>

namespace penstock {

namespace {

constexpr size_t RUN = 64;  // tokens whose keys and queries are made ready at once

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// One value head of one row.
class Head {
 public:
  Head(const Frame& frame, const DeltaShape& shape, const DeltaVectors& vectors, const DeltaInputs& inputs, size_t row,
       size_t head)
      : frame_(frame),
        shape_(shape),
        vectors_(vectors),
        inputs_(inputs),
        head_(head),
        state_(frame.states, frame.row_states[row], shape.layer, head * shape.memory_floats(), shape.memory_floats()) {}

  const StatePart& state() const { return state_; }

  void delta_rule(size_t first, size_t count, const Buffer& mixed, const Buffer& out, float* scratch) const {
    const size_t k_dim = shape_.k_dim, decays = shape_.decays();
    float *q = scratch, *k = q + RUN * k_dim, *faded = k + RUN * k_dim, *decay = faded + RUN * k_dim;
    float *beta = decay + RUN * decays, *columns = beta + RUN;
    const DeltaKernels& kernels = frame_.kernels.delta;
    const float root = 1.0f / std::sqrt(float(k_dim));
    for (size_t i = 0; i < count; ++i) {
      const float* key_head = mixed.row(first + i) + shape_.key_head(head_) * k_dim;
      kernels.unit(key_head, k_dim, root, q + i * k_dim);
      kernels.unit(key_head + shape_.k_width(), k_dim, 1.0f, k + i * k_dim);
      beta[i] = sigmoid(inputs_.beta.row(frame_, first + i)[head_]);
      kernels.decay(inputs_.alpha.row(frame_, first + i) + head_ * decays, &vectors_.dt[head_ * decays],
                    vectors_.decay[head_], decays, decay + i * decays);
      kernels.fade(k + i * k_dim, decay + i * decays, shape_.channel_decay, k_dim, faded + i * k_dim);
    }
    kernels.delta_rule({.q = q,
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
                        .memory = state_.own(),
                        .columns = columns,
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
  const Frame& frame_;
  const DeltaShape& shape_;
  const DeltaVectors& vectors_;
  const DeltaInputs& inputs_;
  size_t head_;
  StatePart state_;
};

}  // namespace

size_t DeltaShape::scratch_floats() const {
  return std::max({RUN * (3 * k_dim + decays() + 1) + k_dim * MAX_COLUMNS, 2 * v_dim, conv().kept_floats()});
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
    if (part == shape.v_heads) return keep_last(frame, shape.conv(), inputs.qkv, row, scratch);
    const Head head(frame, shape, *vectors, inputs, row, part);
    head.state().walk(first, last, RUN, [&](size_t token, size_t count) {
      head.delta_rule(token, count, buffer(mixed), buffer(out), scratch);
    });
    for (size_t token = first; token < last; ++token) head.finish(token, buffer(out), scratch);
  };
  return {chunks, run};
}

}  // namespace penstock
