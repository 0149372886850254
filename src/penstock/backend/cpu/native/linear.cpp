#include "linear.h"

#include <algorithm>

namespace penstock {

namespace {

constexpr size_t CHUNK_BYTES = 32768;  // of weights: long enough to be worth taking, short enough to share out
constexpr size_t CHUNKS_PER_WORKER = 16;
constexpr size_t TILE_PANELS = 2;  // what kernels like to take at once

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

struct Rows {
  const void* data;
  size_t stride;  // bytes
};

struct Product {
  int x, out;
  std::shared_ptr<const Weight> weight;
  bool gated;

  size_t panels() const { return gated ? weight->panels() / 2 : weight->panels(); }

  size_t chunk_panels(unsigned workers) const {
    const size_t panel_bytes = divide_up(weight->bytes(), panels());
    const size_t wanted = std::max(CHUNK_BYTES / panel_bytes, divide_up(panels(), workers * CHUNKS_PER_WORKER));
    return divide_up(std::max<size_t>(wanted, 1), TILE_PANELS) * TILE_PANELS;
  }

  size_t chunks(const Frame& frame) const {
    return divide_up(panels(), chunk_panels(frame.workers)) * divide_up(frame.rows(x), BAND);
  }

  void run(const Frame& frame, size_t chunk) const {
    const size_t bands = divide_up(frame.rows(x), BAND), step = chunk_panels(frame.workers);
    const size_t last = std::min((chunk / bands + 1) * step, panels());
    for (size_t panel = chunk / bands * step; panel < last;) {
      const Run run = weight->panels(panel, last - panel);
      run_panels(frame, run, gated ? weight->panels(panel + panels(), 1).data : nullptr, chunk % bands * BAND);
      panel += run.panels;
    }
  }

  Rows rows_for(const Frame& frame, Format format, size_t row) const {
    const Buffer& from = frame.buffers[size_t(x)];
    if (format >= Format::QUANTIZED) return {from.code_row(row), from.code_stride() * sizeof(CodeBlock)};
    if (format == Format::BF16 && frame.kernels.to_bfloats) return {from.bfloat_row(row), from.bfloat_stride() * 2};
    return {from.row(row), from.width * sizeof(float)};
  }

  void run_panels(const Frame& frame, const Run& run, const std::byte* partners, size_t row) const {
    const Buffer& to = frame.buffers[size_t(out)];
    const Rows from = rows_for(frame, run.part->format, row);
    frame.kernels.product[size_t(run.part->format)]({
        .panels = run.data,
        .partners = partners,
        .panel_bytes = run.part->panel_bytes,
        .width = weight->width(),
        .x = static_cast<const std::byte*>(from.data),
        .x_stride = from.stride,
        .rows = std::min(BAND, frame.rows(x) - row),
        .middles = frame.buffers[size_t(x)].middles(),
        .bias = weight->bias(run.column),
        .y = to.row(row) + run.column,
        .y_stride = to.width,
        .columns = run.columns,
    });
  }
};

}  // namespace

Phase linear_phase(int x, std::shared_ptr<const Weight> weight, int out, bool gated) {
  const Product product = {x, out, std::move(weight), gated};
  return {[product](const Frame& frame) { return product.chunks(frame); },
          [product](const Frame& frame, size_t chunk, unsigned) { product.run(frame, chunk); }};
}

}  // namespace penstock
