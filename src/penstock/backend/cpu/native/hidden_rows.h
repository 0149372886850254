// Hidden states that programs hand to each other in KV blocks: one stores a row at a position of a sequence, in the block
// that holds the position, another loads it from there. So rows are shared, copied and exported with their block. There
// may be several kinds of them, which are numbered. Values are BF16: their range is that of the residual stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "block_rows.h"
#include "cache.h"
#include "memory.h"

namespace penstock {

class HiddenRows {
 public:
  HiddenRows() = default;
  HiddenRows(const HiddenRows&) = delete;

  void declare(size_t number, size_t width);  // numbers come in order; one that is there already has the same width
  void reserve(size_t blocks, size_t block_size, MemoryFile* file = nullptr);  // no file: its memory is private
  void copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs);  // (source, target)
  void export_blocks(Blocks blocks, std::span<std::byte> out) const;
  void import_blocks(Blocks blocks, std::span<const std::byte> data);
  void copy_rows(Blocks blocks, BlockRows& rows, Way way) const;
  // Visits the parts of a block in the order in which export_blocks writes them.
  template <class Visit>
  void visit(int64_t block, Visit visit) const {
    for (size_t number = 0; number < widths_.size(); ++number)
      visit(std::span(memory_[number].as() + size_t(block) * bytes_of(number), bytes_of(number)));
  }

  size_t blocks() const { return blocks_; }
  size_t bytes_per_token() const;
  size_t block_bytes() const { return bytes_per_token() * block_size_; }
  std::string layout() const;  // empty: there are none

  void store(size_t number, const int32_t* table, size_t position, const float* row) const;
  void load(size_t number, const int32_t* table, size_t position, float* row) const;

 private:
  uint16_t* at(size_t number, const int32_t* table, size_t position) const {
    const size_t place = size_t(table[position / block_size_]) * block_size_ + position % block_size_;
    return memory_[number].as<uint16_t>() + place * widths_[number];
  }
  size_t bytes_of(size_t number) const { return widths_[number] * block_size_ * sizeof(uint16_t); }  // in one block
  void check_blocks(Blocks blocks, size_t bytes) const;

  std::vector<size_t> widths_;  // index: kind
  std::vector<Memory> memory_;  // index: kind; [blocks][block_size][width]
  size_t blocks_ = 0, block_size_ = 1;
};

}  // namespace penstock
