// Packed weights: one layout for every ISA.
//
// Rows are taken in panels of 16, so that one vector register holds the same place of 16 rows and a product needs no
// sum across a register. A panel of F32 or F16 is values [width][16], of BF16 pairs of values [width / 2][16][2], with
// zeros up to a whole block of 32; formats.h says what other panels hold, and
// trellis.h what those of EXL3 do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats.h"
#include "memory.h"
#include "trellis.h"

namespace penstock {

inline constexpr Format TRELLIS = Format(FORMATS);  // no format of a PanelProduct

struct Part {
  Format format;
  size_t rows;
  size_t column;  // its first row within the weight
  size_t panels;
  size_t panel_bytes;
  std::byte* data;
  const int8_t* table;  // and what follows: see PanelProduct
  float factor;
  Grouping grouping;
  std::optional<Trellis> trellis = {};
};

// Consecutive panels of one part.
struct Run {
  const Part* part;
  const std::byte* data;
  size_t column;
  size_t columns;  // rows in them: 16 for each, fewer in the last of a part
  size_t panels;
};

class Weight {
 public:
  Weight(size_t width, const std::vector<std::pair<std::string, size_t>>& parts);  // (format, rows) of each

  // Packs rows of the given part, from `row` on, out of bytes as they lie in a checkpoint.
  void fill(size_t part, size_t row, size_t rows, const uint8_t* bytes, size_t size);
  void check(size_t part, size_t row, size_t rows, size_t size) const;  // throws where fill would
  void set_bias(std::vector<float> bias);
  void set_factor(size_t part, float factor);  // what all its values are multiplied with, in formats with a table
  void set_trellis(size_t part, std::vector<float> inputs, std::vector<float> outputs);  // factors, of EXL3
  void exchange(Weight& other);  // swaps the values, scales and biases of two weights with equal layouts

  size_t row_bytes(size_t part) const;  // in a checkpoint
  size_t width() const { return width_; }
  size_t rows() const { return rows_; }
  size_t rows(size_t part) const { return parts_.at(part).rows; }
  size_t panels() const { return panels_; }
  size_t bytes() const { return bytes_; }
  std::shared_ptr<std::byte> packed() const { return {slab_, parts_[0].data}; }  // all parts, one after the other
  bool coded() const { return coded_; }  // some part is multiplied with quantized activations
  bool bfloat() const { return bfloat_; }  // some part is BF16
  bool precise() const;                    // all parts are F32
  bool trellis() const { return parts_[0].format == TRELLIS; }  // all parts are EXL3
  const std::vector<Part>& parts() const { return parts_; }
  bool gateable() const;                 // two halves of which each panel of one has a partner in the other
  Run panels(size_t first, size_t most) const;  // those from `first` on that lie in one part
  const float* bias(size_t column) const { return bias_.empty() ? nullptr : bias_.data() + column; }
  void read_row(size_t row, float* out) const;  // its values

 private:
  bool same_layout(const Weight& other) const;

  size_t width_, rows_ = 0, panels_ = 0, bytes_ = 0;
  bool coded_ = false, bfloat_ = false;
  std::vector<Part> parts_;
  std::vector<float> bias_;
  std::shared_ptr<const Memory> slab_;
};

// Throws for an EXL3 weight, which only plain products take.
void require_panels(const Weight& weight);

double packed_bits(const std::string& format);  // per value, including scales

// A whole part as it lies in a checkpoint.
struct Source {
  Weight* weight;
  size_t part;
  const uint8_t* bytes;
  size_t size;
};

// Packs many parts, shared out evenly among threads, however small each is.
void fill_parts(const std::vector<Source>& sources, unsigned threads);

}  // namespace penstock
