// EXL3 weights: numbers of 1 to 8 bits in a trellis, between Hadamard matrices of 128 values.
//
// A panel of 16 rows is a tile for every 16 columns. A tile of K bits for each number is a ring of 256 * K bits, whose
// 256 numbers fill 16 vectors of 16 lanes: lane l of vector t has number 16 * l + t. The bits of a lane are K words of
// 16 bits, and words of all lanes lie side by side: [K][16]. The 16 bits that end with a number's own are its state, of
// which a code book makes the number. model/formats/exl3.py defines the place of each number in a tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace penstock {

inline constexpr size_t TRELLIS_BITS = 8;      // most bits of a number
inline constexpr size_t HADAMARD_VALUES = 128;  // rows of a Hadamard matrix

enum class CodeBook : uint8_t { PLAIN, MCG, MUL1 };
inline constexpr size_t CODE_BOOKS = 3;

// Where the states of the vectors of a tile end: in the words `window` - 1 and `window` of a lane, `shift` bits before
// their end.
struct TrellisSteps {
  size_t bits;
  uint8_t window[16], shift[16];
};

// y[r][0..16 * count] = x[r] . each row of consecutive panels, for up to BAND rows r of rotated x.
struct TrellisProduct {
  const std::byte* panels;
  size_t panel_bytes, count;
  const TrellisSteps* steps;
  size_t width;
  const float* x;
  size_t x_stride;
  size_t rows;
  float* y;
  size_t y_stride;
};

struct TrellisKernels {
  void (*product[CODE_BOOKS])(const TrellisProduct&);
  // out = Hadamard(x * factors), in the order that products take them
  void (*rotate_inputs)(const float* x, const float* factors, size_t width, float* out);
  void (*rotate_outputs)(const float* factors, const float* bias, size_t width, float* y);  // bias: or null
};

// The data of a part of a weight in addition to its panels.
struct Trellis {
  CodeBook code_book;
  TrellisSteps steps;
  std::vector<float> inputs, outputs;  // factors of the weight's columns and rows
};

std::optional<Trellis> trellis_named(const std::string& format);  // "EXL3-3-mcg": bits and code book
std::string trellis_name(const Trellis& trellis);

// Packs the tiles of a panel out of a checkpoint's.
void pack_tiles(size_t bits, const uint8_t* from, size_t tiles, std::byte* panel);

}  // namespace penstock
