// Causal convolutions over time: each channel sees the last inputs of its own sequence.
#pragma once

#include <memory>

#include "frame.h"

namespace penstock {

struct ConvShape {
  size_t layer, width, conv_width;
  size_t offset;      // floats of a state before the last inputs, [conv_width - 1][width]
  size_t column = 0;  // where the channels begin in a row of inputs
  bool silu = true;   // applied to the output

  size_t kept_floats() const { return (conv_width - 1) * width; }  // what one worker needs to keep them
};

struct ConvVectors {
  std::vector<float> taps;  // [conv_width][width], the tap of the token itself last
  std::vector<float> bias;  // [width], or empty
};

void check(const ConvShape& shape, const ConvVectors& vectors);  // throws for sizes that do not fit

// out = the channels of x, convolved.
Phase convolve_phase(const ConvShape& shape, std::shared_ptr<const ConvVectors> vectors, int x, int out);
// Keeps the inputs with which a row's next convolution begins. No phase before it may have written the row's state.
void keep_last(const Frame& frame, const ConvShape& shape, int x, size_t row, float* scratch);

}  // namespace penstock
