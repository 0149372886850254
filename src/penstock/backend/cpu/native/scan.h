// Mamba's selective scan: each channel has a state of a few numbers, which decays at a rate that its input decides.
#pragma once

#include <memory>

#include "frame.h"

namespace penstock {

struct ScanShape {
  size_t layer, width, state_size;

  size_t groups() const;  // neighbouring channels that one worker computes together
  // A state: the numbers of each group of channels, [state_size][channels of the group].
  size_t state_floats() const { return width * state_size; }
};

struct ScanVectors {
  std::vector<float> decay;  // as a state is laid out
  std::vector<float> skip;   // [width]
};

struct ScanBuffers {
  int x, dt, b, c, gate, out;
};

// Lays [width][state_size] out as a state.
std::vector<float> grouped(const ScanShape& shape, const std::vector<float>& values);
// Each group of channels of each row.
Phase selective_scan_phase(const ScanShape& shape, std::shared_ptr<const ScanVectors> vectors, const ScanBuffers& buffers);

}  // namespace penstock
