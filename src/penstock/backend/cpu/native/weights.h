// Packed weights: one layout for every ISA.
//
// Rows are taken in panels of 16, so that one vector register holds the same place of 16 rows and a product needs no
// sum across a register. Within a panel:
//   F32, F16, BF16    values [width][16]
//   Q4_0, Q4_1, Q8_0  codes [block][group][16][4 bytes], then scales [block][16], then (Q4_1) minima [block][16]
// A group is 4 consecutive values of a row: what an 8-bit dot product instruction takes per lane. A byte of 4-bit codes
// holds group g in its low half and group g + 4 in its high half.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "formats.h"
#include "memory.h"

namespace penstock {

inline constexpr size_t LANES = 16;

struct Part {
  Format format;
  size_t rows;
  size_t column;       // where its rows stand among those of the weight
  size_t panels;
  size_t panel_bytes;
  std::byte* data;
};

struct Panel {
  const Part* part;
  const std::byte* data;
  size_t column;
  size_t lanes;  // rows in it: 16, or fewer in the last of a part
};

class Weight {
 public:
  Weight(size_t width, const std::vector<std::pair<std::string, size_t>>& parts);  // (format, rows) of each

  // Packs rows of the given part, from `row` on, out of bytes as they lie in a checkpoint.
  void fill(size_t part, size_t row, size_t rows, const uint8_t* bytes, size_t size);
  void set_bias(std::vector<float> bias);

  size_t width() const { return width_; }
  size_t rows() const { return rows_; }
  size_t panels() const { return panels_; }
  size_t bytes() const { return memory_.bytes(); }
  bool coded() const { return coded_; }  // some part is multiplied with quantized activations
  Panel panel(size_t index) const;
  const float* bias(size_t column) const { return bias_.empty() ? nullptr : bias_.data() + column; }
  void read_row(size_t row, float* out) const;  // its values

 private:
  size_t width_, rows_ = 0, panels_ = 0;
  bool coded_ = false;
  std::vector<Part> parts_;
  std::vector<float> bias_;
  Memory memory_;
};

}  // namespace penstock
