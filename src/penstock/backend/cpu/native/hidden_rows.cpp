#include "hidden_rows.h"

#include <cstring>
#include <new>

#include "half.h"
#include "require.h"

namespace penstock {

namespace {

constexpr double MAX_BYTES = 0x1p46;  // more than any machine maps
constexpr size_t MAX_WIDTH = 1 << 20;

}  // namespace

void HiddenRows::declare(size_t number, size_t width) {
  require(width >= 1 && width <= MAX_WIDTH, "a hidden state has between 1 and 2^20 values");
  if (number < widths_.size()) {
    require(widths_[number] == width, "hidden states " + std::to_string(number) + " have " +
                                          std::to_string(widths_[number]) + " values, not " + std::to_string(width));
    return;
  }
  require(number == widths_.size(), "hidden states are numbered in order: expected " + std::to_string(widths_.size()) +
                                        ", got " + std::to_string(number));
  widths_.push_back(width);
}

void HiddenRows::reserve(size_t blocks, size_t block_size, MemoryFile* file) {
  blocks_ = 0;
  memory_.clear();
  block_size_ = block_size;
  for (size_t number = 0; number < widths_.size(); ++number) {
    if (double(blocks) * double(bytes_of(number)) > MAX_BYTES) throw std::bad_alloc();
    const size_t bytes = blocks * bytes_of(number);
    memory_.push_back(file ? Memory(bytes, *file) : Memory(bytes));
  }
  blocks_ = blocks;
}

size_t HiddenRows::bytes_per_token() const {
  size_t bytes = 0;
  for (const size_t width : widths_) bytes += width * sizeof(uint16_t);
  return bytes;
}

std::string HiddenRows::layout() const {
  if (widths_.empty()) return "";
  std::string text = "BF16 hidden states of";
  for (const size_t width : widths_) text.append(" ").append(std::to_string(width));
  return text + " values";
}

void HiddenRows::store(size_t number, const int32_t* table, size_t position, const float* row) const {
  uint16_t* out = at(number, table, position);
  for (size_t i = 0; i < widths_[number]; ++i) out[i] = to_bfloat(row[i]);
}

void HiddenRows::load(size_t number, const int32_t* table, size_t position, float* row) const {
  const uint16_t* from = at(number, table, position);
  for (size_t i = 0; i < widths_[number]; ++i) row[i] = from_bfloat(from[i]);
}

void HiddenRows::check_blocks(Blocks blocks, size_t bytes) const {
  require(bytes == blocks.size() * block_bytes(), "the hidden states of these blocks take another number of bytes");
  for (const int64_t block : blocks)
    require(block >= 0 && size_t(block) < blocks_, "block " + std::to_string(block) + " has no hidden states");
}

void HiddenRows::copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  for (const auto& [source, target] : pairs) {
    const int64_t both[] = {source, target};
    check_blocks(both, 2 * block_bytes());
    for (size_t number = 0; number < widths_.size(); ++number) {
      std::byte* base = memory_[number].as();
      std::memmove(base + size_t(target) * bytes_of(number), base + size_t(source) * bytes_of(number),
                   bytes_of(number));
    }
  }
}

void HiddenRows::export_blocks(Blocks blocks, std::span<std::byte> out) const {
  check_blocks(blocks, out.size());
  std::byte* to = out.data();
  for (const int64_t block : blocks)
    for (size_t number = 0; number < widths_.size(); ++number) {
      std::memcpy(to, memory_[number].as() + size_t(block) * bytes_of(number), bytes_of(number));
      to += bytes_of(number);
    }
}

void HiddenRows::import_blocks(Blocks blocks, std::span<const std::byte> data) {
  check_blocks(blocks, data.size());
  const std::byte* from = data.data();
  for (const int64_t block : blocks)
    for (size_t number = 0; number < widths_.size(); ++number) {
      std::memcpy(memory_[number].as() + size_t(block) * bytes_of(number), from, bytes_of(number));
      from += bytes_of(number);
    }
}

void HiddenRows::copy_rows(Blocks blocks, BlockRows& rows, Way way) const {
  check_blocks(blocks, blocks.size() * block_bytes());
  const RowJob job(*this, blocks, rows, way);
  for (uint32_t chunk = 0; chunk < job.chunks(0); ++chunk) job.run(0, chunk, 0);
}

}  // namespace penstock
