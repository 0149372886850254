#include "weights.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "half.h"

namespace penstock {

namespace {

struct Named {
  const char* name;
  Format format;
};
constexpr Named NAMES[] = {{"F32", Format::F32},   {"F16", Format::F16},   {"BF16", Format::BF16},
                           {"Q4_0", Format::Q4_0}, {"Q4_1", Format::Q4_1}, {"Q8_0", Format::Q8_0}};

Format format_of(const std::string& name) {
  for (const auto& named : NAMES)
    if (name == named.name) return named.format;
  throw std::invalid_argument("no native kernel for weights of format " + name);
}

bool quantized(Format format) { return format >= Format::Q4_0; }

size_t row_bytes(Format format, size_t width) {
  switch (format) {
    case Format::F32: return width * 4;
    case Format::F16:
    case Format::BF16: return width * 2;
    case Format::Q4_0: return width / BLOCK * sizeof(BlockQ4_0);
    case Format::Q4_1: return width / BLOCK * sizeof(BlockQ4_1);
    case Format::Q8_0: return width / BLOCK * sizeof(BlockQ8_0);
  }
  return 0;
}

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

template <class T>
void pack_values(const uint8_t* row, size_t width, std::byte* panel, size_t lane) {
  for (size_t k = 0; k < width; ++k) std::memcpy(panel + (k * LANES + lane) * sizeof(T), row + k * sizeof(T), sizeof(T));
}

// Where the scales (and minima) of a panel's block lie, and its codes.
template <class Block>
struct Place {
  static constexpr size_t CODES = sizeof(Block::q) * LANES;
  std::byte* codes;
  std::byte* scales;
  std::byte* minima;

  Place(std::byte* panel, size_t blocks, size_t block, size_t lane)
      : codes(panel + block * CODES + lane * 4),
        scales(panel + blocks * CODES + (block * LANES + lane) * 2),
        minima(scales + blocks * LANES * 2) {}
};

template <class Block>
void pack_blocks(const uint8_t* row, size_t width, std::byte* panel, size_t lane) {
  const size_t blocks = width / BLOCK;
  for (size_t b = 0; b < blocks; ++b) {
    const uint8_t* block = row + b * sizeof(Block);
    const Place<Block> place(panel, blocks, b, lane);
    std::memcpy(place.scales, block + offsetof(Block, d), 2);
    if constexpr (requires { &Block::m; }) std::memcpy(place.minima, block + offsetof(Block, m), 2);
    for (size_t i = 0; i < sizeof(Block::q); i += 4)
      std::memcpy(place.codes + i * LANES, block + offsetof(Block, q) + i, 4);
  }
}

template <class Block>
Block unpack_block(const std::byte* panel, size_t blocks, size_t b, size_t lane) {
  Block block;
  const Place<Block> place(const_cast<std::byte*>(panel), blocks, b, lane);
  std::memcpy(&block.d, place.scales, 2);
  if constexpr (requires { &Block::m; }) std::memcpy(&block.m, place.minima, 2);
  for (size_t i = 0; i < sizeof(Block::q); i += 4) std::memcpy(block.q + i, place.codes + i * LANES, 4);
  return block;
}

void values_of(const BlockQ4_0& block, float* out) {
  const float d = from_half(block.d);
  for (int j = 0; j < 16; ++j) {
    out[j] = d * float((block.q[j] & 15) - 8);
    out[j + 16] = d * float((block.q[j] >> 4) - 8);
  }
}

void values_of(const BlockQ4_1& block, float* out) {
  const float d = from_half(block.d), m = from_half(block.m);
  for (int j = 0; j < 16; ++j) {
    out[j] = d * float(block.q[j] & 15) + m;
    out[j + 16] = d * float(block.q[j] >> 4) + m;
  }
}

void values_of(const BlockQ8_0& block, float* out) {
  const float d = from_half(block.d);
  for (int j = 0; j < 32; ++j) out[j] = d * float(block.q[j]);
}

template <class Block>
void read_blocks(const std::byte* panel, size_t width, size_t lane, float* out) {
  for (size_t b = 0; b < width / BLOCK; ++b)
    values_of(unpack_block<Block>(panel, width / BLOCK, b, lane), out + b * BLOCK);
}

template <class T, class Convert>
void read_values(const std::byte* panel, size_t width, size_t lane, float* out, Convert convert) {
  const T* values = reinterpret_cast<const T*>(panel) + lane;
  for (size_t k = 0; k < width; ++k) out[k] = convert(values[k * LANES]);
}

void pack_row(Format format, const uint8_t* row, size_t width, std::byte* panel, size_t lane) {
  switch (format) {
    case Format::F32: return pack_values<float>(row, width, panel, lane);
    case Format::F16:
    case Format::BF16: return pack_values<uint16_t>(row, width, panel, lane);
    case Format::Q4_0: return pack_blocks<BlockQ4_0>(row, width, panel, lane);
    case Format::Q4_1: return pack_blocks<BlockQ4_1>(row, width, panel, lane);
    case Format::Q8_0: return pack_blocks<BlockQ8_0>(row, width, panel, lane);
  }
}

}  // namespace

Weight::Weight(size_t width, const std::vector<std::pair<std::string, size_t>>& parts) : width_(width) {
  size_t bytes = 0;
  for (const auto& [name, rows] : parts) {
    const Format format = format_of(name);
    if (width == 0 || rows == 0 || width > INT32_MAX || rows > INT32_MAX - rows_)
      throw std::invalid_argument("a weight needs rows and columns, fewer than 2^31 of each");
    if (quantized(format) && width % BLOCK)
      throw std::invalid_argument(name + " rows hold a multiple of 32 values; got " + std::to_string(width));
    const size_t panels = round_up(rows, LANES) / LANES;
    const size_t panel_bytes = round_up(row_bytes(format, width) * LANES, 64);
    parts_.push_back({format, rows, rows_, panels, panel_bytes, nullptr});
    coded_ |= quantized(format);
    rows_ += rows;
    panels_ += panels;
    bytes += panels * panel_bytes;
  }
  if (parts_.empty()) throw std::invalid_argument("a weight needs at least one part");
  memory_ = Memory(bytes);
  std::byte* next = memory_.as();
  for (auto& part : parts_) {
    part.data = next;
    next += part.panels * part.panel_bytes;
  }
}

void Weight::fill(size_t part, size_t row, size_t rows, const uint8_t* bytes, size_t size) {
  if (part >= parts_.size()) throw std::invalid_argument("the weight has no such part");
  const Part& target = parts_[part];
  const size_t stride = row_bytes(target.format, width_);
  if (row > target.rows || rows > target.rows - row) throw std::invalid_argument("rows outside the part");
  if (size != rows * stride)
    throw std::invalid_argument(std::to_string(rows) + " rows take " + std::to_string(rows * stride) + " bytes; got " +
                                std::to_string(size));
  for (size_t i = 0; i < rows; ++i, ++row)
    pack_row(target.format, bytes + i * stride, width_, target.data + row / LANES * target.panel_bytes, row % LANES);
}

void Weight::set_bias(std::vector<float> bias) {
  if (bias.size() != rows_) throw std::invalid_argument("a bias has one value for each row");
  bias_ = std::move(bias);
}

Panel Weight::panel(size_t index) const {
  const Part* part = parts_.data();
  for (; index >= part->panels; ++part) index -= part->panels;
  const size_t row = index * LANES;
  return {part, part->data + index * part->panel_bytes, part->column + row, std::min(LANES, part->rows - row)};
}

void Weight::read_row(size_t row, float* out) const {
  const Part* part = parts_.data();
  for (; row >= part->rows; ++part) row -= part->rows;
  const std::byte* panel = part->data + row / LANES * part->panel_bytes;
  const size_t lane = row % LANES;
  switch (part->format) {
    case Format::F32: return read_values<float>(panel, width_, lane, out, [](float value) { return value; });
    case Format::F16: return read_values<uint16_t>(panel, width_, lane, out, from_half);
    case Format::BF16: return read_values<uint16_t>(panel, width_, lane, out, from_bfloat);
    case Format::Q4_0: return read_blocks<BlockQ4_0>(panel, width_, lane, out);
    case Format::Q4_1: return read_blocks<BlockQ4_1>(panel, width_, lane, out);
    case Format::Q8_0: return read_blocks<BlockQ8_0>(panel, width_, lane, out);
  }
}

}  // namespace penstock
