#include "scan.h"

#include <algorithm>

namespace penstock {

namespace {

constexpr size_t GROUP = 64;  // channels: with 16 numbers each, their states stay in the first cache

}  // namespace

size_t ScanShape::groups() const { return (width + GROUP - 1) / GROUP; }

std::vector<float> grouped(const ScanShape& shape, const std::vector<float>& values) {
  std::vector<float> found(values.size());
  for (size_t channel = 0; channel < shape.width; ++channel) {
    const size_t first = channel / GROUP * GROUP, count = std::min(GROUP, shape.width - first);
    for (size_t i = 0; i < shape.state_size; ++i)
      found[first * shape.state_size + i * count + channel - first] = values[channel * shape.state_size + i];
  }
  return found;
}

Phase selective_scan_phase(const ScanShape& shape, std::shared_ptr<const ScanVectors> vectors,
                           const ScanBuffers& buffers) {
  const auto chunks = [=](const Frame& frame) { return frame.batch.rows * shape.groups(); };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned) {
    const auto buffer = [&](int index) -> const Buffer& { return frame.buffers[size_t(index)]; };
    const size_t row = chunk / shape.groups(), channel = chunk % shape.groups() * GROUP;
    const size_t channels = std::min(GROUP, shape.width - channel), offset = channel * shape.state_size;
    const auto first = size_t(frame.batch.row_start[row]), last = size_t(frame.batch.row_start[row + 1]);
    if (first == last) return;
    const StatePart state(frame.states, frame.row_states[row], shape.layer, offset, channels * shape.state_size);
    const Buffer& gate = buffer(buffers.gate);
    state.walk(first, last, last - first, [&](size_t token, size_t count) {
      frame.kernels.mamba.scan({.x = buffer(buffers.x).row(token) + channel,
                                .dt = buffer(buffers.dt).row(token) + channel,
                                .gate = gate.row(token) + gate.width - shape.width + channel,
                                .gate_stride = gate.width,
                                .b = buffer(buffers.b).row(token),
                                .c = buffer(buffers.c).row(token),
                                .decay = vectors->decay.data() + offset,
                                .skip = vectors->skip.data() + channel,
                                .stride = shape.width,
                                .channels = channels,
                                .state_size = shape.state_size,
                                .count = count,
                                .state = state.own(),
                                .out = buffer(buffers.out).row(token) + channel});
    });
  };
  return {chunks, run};
}

}  // namespace penstock
