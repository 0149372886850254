// The part of Program that multiplies with EXL3 weights.
#include <algorithm>

#include "linear.h"
#include "program.h"

namespace penstock {

// Each part has factors of its own for the columns, so x is rotated for each.
void Program::trellis_linear(int x, std::shared_ptr<const Weight> weight, int out) {
  const int rotated = rotated_buffer(at(x).symbol, weight->parts().size() * weight->width());
  each_row(rotated, [=](const Frame& frame, size_t r) {
    rotate_inputs(frame.kernels, *weight, frame.buffers[size_t(x)].row(r), frame.buffers[size_t(rotated)].row(r));
  });
  phases_.push_back(linear_phase(rotated, weight, out, false));
  each_row(out, [=](const Frame& frame, size_t r) {
    rotate_outputs(frame.kernels, *weight, frame.buffers[size_t(out)].row(r));
  });
  add_updates(x, weight.get(), out);
  prepare_rows(out);
}

// One buffer for all such products, as wide as the widest needs.
int Program::rotated_buffer(Symbol symbol, size_t width) {
  int& found = rotated_[size_t(symbol)];
  if (found < 0) found = buffer(symbol == Symbol::T ? "T" : "S", width, false);
  buffers_[size_t(found)].width = std::max(buffers_[size_t(found)].width, width);
  return found;
}

}  // namespace penstock
