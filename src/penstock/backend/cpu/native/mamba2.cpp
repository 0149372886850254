#include "mamba2.h"

#include <algorithm>
#include <cmath>

namespace penstock {

namespace {

constexpr size_t RUN = 64;  // tokens whose steps and decays are computed at once

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Computes one head of tokens of one row. `scratch` has room for two floats per token.
void scan(const Frame& frame, const Mamba2Shape& shape, const Mamba2Vectors& vectors, size_t head, float* memory,
          size_t first, size_t count, int zxbcdt, int mixed, int out, float* scratch) {
  const Buffer &in = frame.buffers[size_t(zxbcdt)], &xbc = frame.buffers[size_t(mixed)];
  const Buffer& to = frame.buffers[size_t(out)];
  float *dt = scratch, *decay = scratch + RUN;
  for (size_t i = 0; i < count; ++i) {
    const float raw = in.row(first + i)[shape.inner() + shape.width() + head] * vectors.dt_scale;
    dt[i] = std::clamp(softplus(raw + vectors.dt_bias[head]), vectors.dt_min, vectors.dt_max);
    decay[i] = std::exp(vectors.decay[head] * dt[i]);
  }
  const size_t group = head / (shape.heads / shape.groups);
  const float *x = xbc.row(first) + head * shape.head_dim, *b = xbc.row(first) + shape.inner() + group * shape.state_dim;
  frame.kernels.mamba2.scan({.x = x,
                             .b = b,
                             .c = b + shape.groups * shape.state_dim,
                             .stride = xbc.width,
                             .dt = dt,
                             .decay = decay,
                             .skip = vectors.skip[head],
                             .state_dim = shape.state_dim,
                             .head_dim = shape.head_dim,
                             .count = count,
                             .memory = memory,
                             .out = to.row(first) + head * shape.head_dim,
                             .out_stride = to.width});
}

}  // namespace

size_t Mamba2Shape::scratch_floats() const { return std::max(2 * RUN, conv().kept_floats()); }

Phase selective_scan_phase(const Mamba2Shape& shape, std::shared_ptr<const Mamba2Vectors> vectors, int zxbcdt, int mixed,
                           int out) {
  const size_t parts = shape.heads + 1;
  const auto chunks = [parts](const Frame& frame) { return frame.batch.rows * parts; };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned worker) {
    float* scratch = frame.scratch[worker].as<float>();
    const size_t row = chunk / parts, head = chunk % parts;
    const auto first = size_t(frame.batch.row_start[row]), last = size_t(frame.batch.row_start[row + 1]);
    if (first == last) return;
    if (head == shape.heads) return keep_last(frame, shape.conv(), zxbcdt, row, scratch);
    const size_t floats = shape.memory_floats();
    const StatePart state(frame.states, frame.row_states[row], shape.layer, head * floats, floats);
    state.walk(first, last, RUN, [&](size_t token, size_t count) {
      scan(frame, shape, *vectors, head, state.own(), token, count, zxbcdt, mixed, out, scratch);
    });
  };
  return {chunks, run};
}

void gate_and_norm(const Frame& frame, const Mamba2Shape& shape, const Mamba2Vectors& vectors, int zxbcdt, int out,
                   size_t token) {
  float* y = frame.buffers[size_t(out)].row(token);
  frame.kernels.mamba2.gate(y, frame.buffers[size_t(zxbcdt)].row(token), vectors.z_scale, shape.inner(), y);
  if (vectors.gain.empty()) return;
  const size_t width = shape.inner() / vectors.norm_groups;
  for (size_t i = 0; i < shape.inner(); i += width)
    frame.kernels.add_norm(y + i, nullptr, vectors.gain.data() + i, vectors.eps, width, nullptr, y + i);
}

}  // namespace penstock
