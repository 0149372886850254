// The part of Program that convolves over time, and the selective scan that follows in Mamba.
#include "program.h"
#include "require.h"

namespace penstock {

void Program::causal_conv(int x, const ConvShape& shape, ConvVectors vectors, std::optional<int> product, int out) {
  check(shape, vectors);
  const size_t width = shape.width;
  require(width && at(x).symbol == Symbol::T && at(x).width >= (product ? 3 : 1) * width,
          "rows of a convolution have all its channels");
  at(out, Symbol::T, width);
  if (product) {
    at(*product, Symbol::T, width);
    each_row(*product, [=, to = *product](const Frame& frame, size_t r) {
      const float* row = frame.buffers[size_t(x)].row(r);
      frame.kernels.mamba.multiply(row, row + 2 * width, width, frame.buffers[size_t(to)].row(r));
    });
  }
  const int inputs = product.value_or(x);
  states_.add_layer(shape.layer, shape.kept_floats());
  scratch_floats_ = std::max(scratch_floats_, shape.kept_floats());
  phases_.push_back(convolve_phase(shape, std::make_shared<const ConvVectors>(std::move(vectors)), inputs, out));
  phases_.push_back({[](const Frame& frame) { return frame.batch.rows; },
                     [=](const Frame& frame, size_t row, unsigned worker) {
                       if (frame.batch.row_start[row] == frame.batch.row_start[row + 1]) return;
                       keep_last(frame, shape, inputs, row, frame.scratch[worker].as<float>());
                     }});
  if (!product) return prepare_rows(out);
  each_row(out, [=](const Frame& frame, size_t r) {
    float* row = frame.buffers[size_t(out)].row(r);
    frame.kernels.mamba.multiply(row, frame.buffers[size_t(x)].row(r) + width, width, row);
  });
}

void Program::selective_scan(const ScanBuffers& buffers, const ScanShape& shape, ScanVectors vectors) {
  require(shape.width && shape.state_size && shape.state_size <= 65536, "a channel has a state of 1 to 65536 numbers");
  require(vectors.decay.size() == shape.state_floats() && vectors.skip.size() == shape.width,
          "a vector of a selective scan has another size than its shape says");
  for (int each : {buffers.x, buffers.dt, buffers.out}) at(each, Symbol::T, shape.width);
  for (int each : {buffers.b, buffers.c}) at(each, Symbol::T, shape.state_size);
  require(at(buffers.gate).symbol == Symbol::T && at(buffers.gate).width >= shape.width, "each channel has a gate");
  states_.add_layer(shape.layer, shape.state_floats());
  vectors.decay = grouped(shape, vectors.decay);
  const auto shared = std::make_shared<const ScanVectors>(std::move(vectors));
  phases_.push_back(selective_scan_phase(shape, shared, buffers));
  prepare_rows(buffers.out);
}

}  // namespace penstock
