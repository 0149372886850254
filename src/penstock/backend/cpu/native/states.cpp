#include "states.h"

#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>

#include "require.h"

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

std::string States::layout() const {
  std::string text = "states of";
  for (const size_t floats : floats_) text.append(" ").append(std::to_string(floats));
  return text + " F32 values";
}

void States::reserve(size_t count, MemoryFile* file) {
  memory_ = Memory();
  base_.clear();
  count_ = 0;
  if (!count || floats_.empty()) return;
  if (double(count) * double(bytes()) > MAX_BYTES) throw std::bad_alloc();
  memory_ = file ? Memory(count * bytes(), *file) : Memory(count * bytes());
  float* next = memory_.as<float>();
  for (size_t floats : floats_) {
    base_.push_back(next);
    next += count * floats;
  }
  count_ = count;
}

void States::check(std::span<const int64_t> states, size_t size) const {
  require(size == states.size() * bytes(), "the states take another number of bytes");
  for (const int64_t state : states)
    require(state >= 0 && size_t(state) < count_, "there is no state " + std::to_string(state));
}

void States::export_states(std::span<const int64_t> states, std::span<std::byte> out) const {
  check(states, out.size());
  std::byte* to = out.data();
  for (const int64_t state : states)
    for (size_t layer = 0; layer < floats_.size(); ++layer) {
      std::memcpy(to, at(layer, state), floats_[layer] * sizeof(float));
      to += floats_[layer] * sizeof(float);
    }
}

void States::import_states(std::span<const int64_t> states, std::span<const std::byte> data) {
  check(states, data.size());
  const std::byte* from = data.data();
  for (const int64_t state : states)
    for (size_t layer = 0; layer < floats_.size(); ++layer) {
      std::memcpy(at(layer, state), from, floats_[layer] * sizeof(float));
      from += floats_[layer] * sizeof(float);
    }
}

}  // namespace penstock
