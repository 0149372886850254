#include "linear.h"

#include <algorithm>

namespace penstock {

namespace {

constexpr size_t CHUNK_BYTES = 32768;  // weights: long enough to be worth taking, short enough to share out
constexpr size_t CHUNKS_PER_WORKER = 16;
constexpr size_t TILE_PANELS = 2;  // what kernels like to take at once

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

size_t panels_of(const Weight& weight, bool gated) { return gated ? weight.panels() / 2 : weight.panels(); }

struct Product {
  int x, out;
  std::shared_ptr<const Weight> weight;
  bool gated;

  size_t panels() const { return panels_of(*weight, gated); }

  size_t chunks(const Frame& frame) const {
    return divide_up(panels(), panels_at_once(*weight, gated, 1, frame.workers)) * divide_up(frame.rows(x), BAND);
  }

  void run(const Frame& frame, size_t chunk) const {
    const size_t bands = divide_up(frame.rows(x), BAND), step = panels_at_once(*weight, gated, 1, frame.workers);
    const size_t row = chunk % bands * BAND, first = chunk / bands * step;
    multiply(frame.kernels, frame.buffers[size_t(x)], row, std::min(BAND, frame.rows(x) - row), *weight, gated, first,
             std::min(first + step, panels()), frame.buffers[size_t(out)]);
  }
};

void multiply_panels(const Kernels& kernels, const Buffer& x, size_t row, size_t rows, const Weight& weight,
                     const Run& run, const std::byte* partners, const Buffer& out) {
  const Rows from = rows_for(kernels, x, run.part->format, row);
  kernels.product[size_t(run.part->format)]({
      .panels = run.data,
      .partners = partners,
      .panel_bytes = run.part->panel_bytes,
      .width = weight.width(),
      .x = static_cast<const std::byte*>(from.data),
      .x_stride = from.stride,
      .rows = rows,
      .middles = x.middles(),
      .bias = weight.bias(run.column),
      .y = out.row(row) + run.column,
      .y_stride = out.width,
      .columns = run.columns,
      .table = run.part->table,
      .factor = run.part->factor,
      .grouping = run.part->grouping,
  });
}

void multiply_trellis(const Kernels& kernels, const Buffer& x, size_t row, size_t rows, const Weight& weight,
                      const Run& run, const Buffer& out) {
  const auto part = size_t(run.part - weight.parts().data());
  kernels.trellis.product[size_t(run.part->trellis->code_book)]({
      .panels = run.data,
      .panel_bytes = run.part->panel_bytes,
      .count = run.panels,
      .steps = &run.part->trellis->steps,
      .width = weight.width(),
      .x = x.row(row) + part * weight.width(),
      .x_stride = x.width,
      .rows = rows,
      .y = out.row(row) + run.column,
      .y_stride = out.width,
  });
}

// The rows' values from a place on.
Rows after(Rows rows, Format format, bool bfloats, size_t place) {
  const size_t bytes = format >= Format::QUANTIZED ? place / BLOCK * sizeof(CodeBlock) : place * (bfloats ? 2 : 4);
  return {static_cast<const std::byte*>(rows.data) + bytes, rows.stride};
}

struct HeadProducts {
  int x, out;
  std::shared_ptr<const Weight> weight;
  size_t heads, kept;

  size_t step(const Frame& frame) const { return panels_at_once(*weight, false, 1, frame.workers); }

  size_t chunks(const Frame& frame) const {
    return divide_up(weight->panels(), step(frame)) * divide_up(frame.rows(x), BAND);
  }

  void run(const Frame& frame, size_t chunk) const {
    const size_t bands = divide_up(frame.rows(x), BAND), row = chunk % bands * BAND;
    const size_t last = std::min((chunk / bands + 1) * step(frame), weight->panels());
    for (size_t panel = chunk / bands * step(frame); panel < last;) {
      const Run run = weight->panels(panel, last - panel);
      multiply_head(frame, run, row);
      panel += run.panels;
    }
  }

  void multiply_head(const Frame& frame, const Run& run, size_t row) const {
    const Buffer &from = frame.buffers[size_t(x)], &to = frame.buffers[size_t(out)];
    const Format format = run.part->format;
    const bool bfloats = format == Format::BF16 && frame.kernels.to_bfloats;
    const size_t width = weight->width(), rows = weight->rows() / heads, head = run.column / rows;
    const Rows mine = after(rows_for(frame.kernels, from, format, row), format, bfloats, head * (width + kept));
    frame.kernels.product[size_t(format)]({
        .panels = run.data,
        .partners = nullptr,
        .panel_bytes = run.part->panel_bytes,
        .width = width,
        .x = static_cast<const std::byte*>(mine.data),
        .x_stride = mine.stride,
        .rows = std::min(BAND, frame.rows(x) - row),
        .middles = from.middles(),
        .bias = nullptr,
        .y = to.row(row) + head * (kept + rows) + kept + run.column % rows,
        .y_stride = to.width,
        .columns = run.columns,
        .table = run.part->table,
        .factor = run.part->factor,
        .grouping = run.part->grouping,
    });
  }
};

}  // namespace

Rows rows_for(const Kernels& kernels, const Buffer& from, Format format, size_t row) {
  if (format >= Format::QUANTIZED) return {from.code_row(row), from.code_stride() * sizeof(CodeBlock)};
  if (format == Format::BF16 && kernels.to_bfloats) return {from.bfloat_row(row), from.bfloat_stride() * 2};
  return {from.row(row), from.width * sizeof(float)};
}

Phase heads_phase(int x, std::shared_ptr<const Weight> weight, size_t heads, size_t kept, int out) {
  const HeadProducts products = {x, out, std::move(weight), heads, kept};
  return {[products](const Frame& frame) { return products.chunks(frame); },
          [products](const Frame& frame, size_t chunk, unsigned) { products.run(frame, chunk); }};
}

size_t panels_at_once(const Weight& weight, bool gated, size_t products, unsigned workers) {
  const size_t panels = panels_of(weight, gated), panel_bytes = divide_up(weight.bytes(), panels);
  const size_t share = divide_up(products * panels, workers * CHUNKS_PER_WORKER);
  const size_t wanted = std::max(CHUNK_BYTES / panel_bytes, share);
  return divide_up(std::max<size_t>(wanted, 1), TILE_PANELS) * TILE_PANELS;
}

void multiply(const Kernels& kernels, const Buffer& x, size_t row, size_t rows, const Weight& weight, bool gated,
              size_t first_panel, size_t last_panel, const Buffer& out) {
  for (size_t panel = first_panel; panel < last_panel;) {
    const Run run = weight.panels(panel, last_panel - panel);
    if (weight.trellis())
      multiply_trellis(kernels, x, row, rows, weight, run, out);
    else
      multiply_panels(kernels, x, row, rows, weight, run,
                      gated ? weight.panels(panel + panels_of(weight, gated), 1).data : nullptr, out);
    panel += run.panels;
  }
}

void rotate_inputs(const Kernels& kernels, const Weight& weight, const float* row, float* out) {
  for (const Part& part : weight.parts()) {
    kernels.trellis.rotate_inputs(row, part.trellis->inputs.data(), weight.width(), out);
    out += weight.width();
  }
}

void rotate_outputs(const Kernels& kernels, const Weight& weight, float* row) {
  for (const Part& part : weight.parts())
    kernels.trellis.rotate_outputs(part.trellis->outputs.data(), weight.bias(part.column), part.rows,
                                   row + part.column);
}

Phase linear_phase(int x, std::shared_ptr<const Weight> weight, int out, bool gated) {
  const Product product = {x, out, std::move(weight), gated};
  return {[product](const Frame& frame) { return product.chunks(frame); },
          [product](const Frame& frame, size_t chunk, unsigned) { product.run(frame, chunk); }};
}

}  // namespace penstock
