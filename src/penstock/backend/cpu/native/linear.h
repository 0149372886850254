// x @ weight.T (+ bias), cut into chunks of panels and rows.
#pragma once

#include <memory>

#include "frame.h"
#include "weights.h"

namespace penstock {

struct Rows {
  const void* data;
  size_t stride;  // bytes
};

// The rows of a buffer from `row` on, in the form that products with this format take.
Rows rows_for(const Kernels& kernels, const Buffer& from, Format format, size_t row);

// `gated`: silu(x @ first half of the weight) * (x @ second half), for a weight that is gateable.
Phase linear_phase(int x, std::shared_ptr<const Weight> weight, int out, bool gated);

// The same of some rows, at most BAND, and panels (of the first half, if gated). With an EXL3 weight x is what
// rotate_inputs makes of rows, and rotate_outputs is still to come.
void multiply(const Kernels& kernels, const Buffer& x, size_t row, size_t rows, const Weight& weight, bool gated,
              size_t first_panel, size_t last_panel, const Buffer& out);

// What an EXL3 weight multiplies instead of a row: one after the other for each part, which has factors of its own.
void rotate_inputs(const Kernels& kernels, const Weight& weight, const float* row, float* out);

// Turns a product with an EXL3 weight into x @ weight.T (+ bias).
void rotate_outputs(const Kernels& kernels, const Weight& weight, float* row);

// Of each head its own: x [heads][a + kept], weight of a part [b][a] for each, out [heads][kept + b]. What is kept is
// left to be copied.
Phase heads_phase(int x, std::shared_ptr<const Weight> weight, size_t heads, size_t kept, int out);

// A fair share of the panels for a chunk, where that many products are shared out.
size_t panels_at_once(const Weight& weight, bool gated, size_t products, unsigned workers);

}  // namespace penstock
