#include "linear.h"

#include <algorithm>

namespace penstock {

namespace {

constexpr size_t CHUNK_ROWS = 96;      // their codes stay in the second-level cache while panels pass
constexpr size_t CHUNK_BYTES = 32768;  // of weights: long enough to be worth taking, short enough to share out
constexpr size_t CHUNKS_PER_WORKER = 16;
constexpr size_t TILE_PANELS = 2;  // what kernels like to take at once

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

struct Grid {
  size_t panels;  // per chunk
  size_t groups;  // of panels
  size_t bands;   // of rows

  Grid(const Weight& weight, size_t rows, unsigned workers) {
    const size_t panel_bytes = std::max<size_t>(1, weight.bytes() / weight.panels());
    const size_t most = size_t(workers) * CHUNKS_PER_WORKER;
    panels = std::max(CHUNK_BYTES / panel_bytes, divide_up(weight.panels(), most));
    panels = divide_up(panels, TILE_PANELS) * TILE_PANELS;
    groups = divide_up(weight.panels(), panels);
    bands = divide_up(rows, CHUNK_ROWS);
  }
};

void run_panels(const Frame& frame, const Weight& weight, const Run& run, const Buffer& x, const Buffer& y, size_t row,
                size_t rows) {
  const bool coded = run.part->format >= Format::QUANTIZED;
  const PanelProduct product = {
      .panels = run.data,
      .panel_bytes = run.part->panel_bytes,
      .width = weight.width(),
      .x = reinterpret_cast<const std::byte*>(coded ? (const void*)x.code_row(row) : x.row(row)),
      .x_stride = coded ? weight.width() / BLOCK * sizeof(CodeBlock) : weight.width() * sizeof(float),
      .rows = rows,
      .bias = weight.bias(run.column),
      .y = y.row(row) + run.column,
      .y_stride = y.width,
      .columns = run.columns,
  };
  frame.kernels.product[size_t(run.part->format)](product);
}

}  // namespace

Phase linear_phase(int x, std::shared_ptr<const Weight> weight, int out) {
  const auto chunks = [=](const Frame& frame) {
    const Grid grid(*weight, frame.rows(x), frame.workers);
    return grid.groups * grid.bands;
  };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned) {
    const size_t rows = frame.rows(x);
    const Grid grid(*weight, rows, frame.workers);
    const size_t row = chunk % grid.bands * CHUNK_ROWS;
    size_t panel = chunk / grid.bands * grid.panels;
    const size_t last = std::min(panel + grid.panels, weight->panels());
    while (panel < last) {
      const Run run = weight->panels(panel, last - panel);
      run_panels(frame, *weight, run, frame.buffers[size_t(x)], frame.buffers[size_t(out)], row,
                 std::min(CHUNK_ROWS, rows - row));
      panel += run.panels;
    }
  };
  return {chunks, run};
}

}  // namespace penstock
