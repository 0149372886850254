#include "conv.h"

#include <algorithm>

#include "require.h"

namespace penstock {

namespace {

constexpr size_t CONVOLVED_AT_ONCE = 8;  // tokens per chunk

// Inputs of one row's convolution: first the state's, then its tokens'.
class Inputs {
 public:
  Inputs(const Frame& frame, const ConvShape& shape, int x, size_t row)
      : shape_(shape), buffer_(frame.buffers[size_t(x)]), first_(size_t(frame.batch.row_start[row])) {
    const RowState& state = frame.row_states[row];
    if (state.begin != NO_STATE) before_ = frame.states.at(shape.layer, state.begin) + shape.offset;
  }

  // The one `index` tokens after the row's first; null: there is nothing yet.
  const float* at(ptrdiff_t index) const {
    if (index >= 0) return buffer_.row(first_ + size_t(index)) + shape_.column;
    return before_ ? before_ + (ptrdiff_t(shape_.conv_width) - 1 + index) * ptrdiff_t(shape_.width) : nullptr;
  }

  // The last inputs after this many of the row's tokens.
  void copy_last(size_t tokens, float* out) const {
    for (size_t i = 0; i + 1 < shape_.conv_width; ++i, out += shape_.width) {
      const float* input = at(ptrdiff_t(tokens + i + 1) - ptrdiff_t(shape_.conv_width));
      input ? (void)std::copy_n(input, shape_.width, out) : (void)std::fill_n(out, shape_.width, 0.0f);
    }
  }

 private:
  const ConvShape& shape_;
  const Buffer& buffer_;
  size_t first_;
  const float* before_ = nullptr;
};

}  // namespace

void check(const ConvShape& shape, const ConvVectors& vectors) {
  require(shape.conv_width >= 1 && shape.conv_width <= MAX_CONV_WIDTH, "a convolution sees 1 to 16 positions");
  require(vectors.taps.size() == shape.conv_width * shape.width, "a convolution has a tap for each position and channel");
  require(vectors.bias.empty() || vectors.bias.size() == shape.width, "a convolution's bias is as wide as its channels");
}

Phase convolve_phase(const ConvShape& shape, std::shared_ptr<const ConvVectors> vectors, int x, int out) {
  const auto chunks = [](const Frame& frame) {
    return (frame.batch.tokens_count + CONVOLVED_AT_ONCE - 1) / CONVOLVED_AT_ONCE;
  };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned) {
    const Buffer& to = frame.buffers[size_t(out)];
    const int32_t* starts = frame.batch.row_start;
    const size_t last = std::min((chunk + 1) * CONVOLVED_AT_ONCE, frame.batch.tokens_count);
    for (size_t token = chunk * CONVOLVED_AT_ONCE; token < last; ++token) {
      const size_t row = size_t(std::upper_bound(starts, starts + frame.batch.rows + 1, int32_t(token)) - starts) - 1;
      const Inputs inputs(frame, shape, x, row);
      const float* seen[MAX_CONV_WIDTH];
      for (size_t tap = 0; tap < shape.conv_width; ++tap)
        seen[tap] = inputs.at(ptrdiff_t(token) - starts[row] + ptrdiff_t(tap + 1) - ptrdiff_t(shape.conv_width));
      frame.kernels.delta.convolve({.seen = seen,
                                    .taps = vectors->taps.data(),
                                    .bias = vectors->bias.empty() ? nullptr : vectors->bias.data(),
                                    .conv_width = shape.conv_width,
                                    .width = shape.width,
                                    .silu = shape.silu,
                                    .out = to.row(token)});
    }
  };
  return {chunks, run};
}

void keep_last(const Frame& frame, const ConvShape& shape, int x, size_t row, float* scratch) {
  const RowState& state = frame.row_states[row];
  const Inputs inputs(frame, shape, x, row);
  const size_t tokens = size_t(frame.batch.row_start[row + 1] - frame.batch.row_start[row]);
  const auto place = [&](int32_t index) { return frame.states.at(shape.layer, index) + shape.offset; };
  if (state.save != NO_STATE) inputs.copy_last(size_t(state.after), place(state.save));
  inputs.copy_last(tokens, scratch);
  std::copy_n(scratch, shape.kept_floats(), place(state.own));
}

}  // namespace penstock
