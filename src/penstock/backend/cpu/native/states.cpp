#include "states.h"

#include <new>
#include <numeric>
#include <stdexcept>
#include <string>

namespace penstock {

namespace {

constexpr double MAX_BYTES = 0x1p46;  // more than any machine maps

}  // namespace

void States::add_layer(size_t layer, size_t floats) {
  if (layer != floats_.size())
    throw std::invalid_argument("layers with states come in order: expected " + std::to_string(floats_.size()) +
                                ", got " + std::to_string(layer));
  floats_.push_back(floats);
}

size_t States::bytes() const { return std::accumulate(floats_.begin(), floats_.end(), size_t(0)) * sizeof(float); }

void States::reserve(size_t count) {
  memory_ = Memory();
  base_.clear();
  count_ = 0;
  if (!count || floats_.empty()) return;
  if (double(count) * double(bytes()) > MAX_BYTES) throw std::bad_alloc();
  memory_ = Memory(count * bytes());
  float* next = memory_.as<float>();
  for (size_t floats : floats_) {
    base_.push_back(next);
    next += count * floats;
  }
  count_ = count;
}

}  // namespace penstock
