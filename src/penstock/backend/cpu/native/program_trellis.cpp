// The part of Program that multiplies with EXL3 weights.
#include <algorithm>

#include "linear.h"
#include "program.h"

namespace penstock {

namespace {

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

struct TrellisLinear {
  std::shared_ptr<const Weight> weight;
  int rotated, out;

  size_t step(const Frame& frame) const { return panels_at_once(*weight, false, 1, frame.workers); }
  size_t bands(const Frame& frame) const { return divide_up(frame.rows(out), BAND); }
  size_t chunks(const Frame& frame) const { return divide_up(weight->panels(), step(frame)) * bands(frame); }

  void run(const Frame& frame, size_t chunk) const {
    const size_t first = chunk / bands(frame) * step(frame), last = std::min(first + step(frame), weight->panels());
    for (size_t panel = first; panel < last;) {
      const Run run = weight->panels(panel, last - panel);
      multiply(frame, run, chunk % bands(frame) * BAND);
      panel += run.panels;
    }
  }

  void multiply(const Frame& frame, const Run& run, size_t row) const {
    const Buffer &from = frame.buffers[size_t(rotated)], &to = frame.buffers[size_t(out)];
    const auto part = size_t(run.part - weight->parts().data());
    frame.kernels.trellis.product[size_t(run.part->trellis->code_book)]({
        .panels = run.data,
        .panel_bytes = run.part->panel_bytes,
        .count = run.panels,
        .steps = &run.part->trellis->steps,
        .width = weight->width(),
        .x = from.row(row) + part * weight->width(),
        .x_stride = from.width,
        .rows = std::min(BAND, frame.rows(out) - row),
        .y = to.row(row) + run.column,
        .y_stride = to.width,
    });
  }
};

}  // namespace

// Each part has factors of its own for the columns, so x is rotated for each.
void Program::trellis_linear(int x, std::shared_ptr<const Weight> weight, int out) {
  const int rotated = rotated_buffer(at(x).symbol, weight->parts().size() * weight->width());
  each_row(rotated, [=](const Frame& frame, size_t r) {
    const float* row = frame.buffers[size_t(x)].row(r);
    float* to = frame.buffers[size_t(rotated)].row(r);
    for (const Part& part : weight->parts()) {
      frame.kernels.trellis.rotate_inputs(row, part.trellis->inputs.data(), weight->width(), to);
      to += weight->width();
    }
  });
  const TrellisLinear linear = {weight, rotated, out};
  phases_.push_back({[linear](const Frame& frame) { return linear.chunks(frame); },
                     [linear](const Frame& frame, size_t chunk, unsigned) { linear.run(frame, chunk); }});
  each_row(out, [=](const Frame& frame, size_t r) {
    float* row = frame.buffers[size_t(out)].row(r);
    for (const Part& part : weight->parts())
      frame.kernels.trellis.rotate_outputs(part.trellis->outputs.data(), weight->bias(part.column), part.rows,
                                           row + part.column);
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
