// Holds the recurrent states of sequences: one for each slot and, after them, saved ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory.h"

namespace penstock {

inline constexpr int32_t NO_STATE = -1;

// Which states a row reads and writes.
struct RowState {
  int32_t begin;  // the state that it begins with; NO_STATE: zeros
  int32_t own;
  int32_t save = NO_STATE;
  int32_t after = 0;  // the number of its tokens after which the state is saved
};

struct StateMove {
  size_t row;
  int32_t begin, save, after;
};

class States {
 public:
  void add_layer(size_t layer, size_t floats);  // layers come in order
  void reserve(size_t count, MemoryFile* file = nullptr);  // no file: its memory is private
  void export_states(std::span<const int64_t> states, std::span<std::byte> out) const;
  void import_states(std::span<const int64_t> states, std::span<const std::byte> data);

  size_t layers() const { return floats_.size(); }
  size_t count() const { return count_; }
  size_t bytes() const;  // per state
  std::string layout() const;
  bool same_layers(const States& other) const { return floats_ == other.floats_; }
  float* at(size_t layer, int64_t state) const { return base_[layer] + size_t(state) * floats_[layer]; }

 private:
  void check(std::span<const int64_t> states, size_t size) const;

  std::vector<size_t> floats_;
  std::vector<float*> base_;  // index: layer
  size_t count_ = 0;
  Memory memory_;
};

// A part of a row's state, such as the memory of one head: `count` floats that begin after `offset`.
class StatePart {
 public:
  StatePart(const States& states, const RowState& row, size_t layer, size_t offset, size_t count)
      : states_(states), row_(row), layer_(layer), offset_(offset), count_(count) {}

  float* own() const { return at(row_.own); }

  // Takes the part through the row's tokens: `run(token, count)` computes up to `most` of them at once.
  template <class Run>
  void walk(size_t first, size_t last, size_t most, Run run) const {
    const size_t saved = row_.save == NO_STATE ? last : first + size_t(row_.after);
    begin();
    for (size_t token = first; token < last;) {
      const size_t count = std::min(most, (token < saved ? saved : last) - token);
      run(token, count);
      token += count;
      if (token == saved && row_.save != NO_STATE) std::copy_n(own(), count_, at(row_.save));
    }
  }

 private:
  float* at(int32_t state) const { return states_.at(layer_, state) + offset_; }

  void begin() const {
    if (row_.begin == NO_STATE)
      std::fill_n(own(), count_, 0.0f);
    else if (row_.begin != row_.own)
      std::copy_n(at(row_.begin), count_, own());
  }

  const States& states_;
  const RowState& row_;
  size_t layer_, offset_, count_;
};

}  // namespace penstock
