// Holds the recurrent states of sequences: one for each slot and, after them, saved ones.
#pragma once

#include <cstddef>
#include <cstdint>
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
  void reserve(size_t count);

  size_t layers() const { return floats_.size(); }
  size_t count() const { return count_; }
  size_t bytes() const;  // of one state
  float* at(size_t layer, int32_t state) const { return base_[layer] + size_t(state) * floats_[layer]; }

 private:
  std::vector<size_t> floats_;
  std::vector<float*> base_;  // of each layer
  size_t count_ = 0;
  Memory memory_;
};

}  // namespace penstock
