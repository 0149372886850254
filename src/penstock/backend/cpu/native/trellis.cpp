#include "trellis.h"

#include <cstring>

namespace penstock {

namespace {

const char* const NAMES[CODE_BOOKS] = {"3inst", "mcg", "mul1"};

TrellisSteps steps_of(size_t bits) {
  TrellisSteps steps = {.bits = bits, .window = {}, .shift = {}};
  for (size_t t = 0; t < 16; ++t) {
    const size_t end = (t + 1) * bits, window = (end - 1) / 16;
    steps.window[t] = uint8_t(window);
    steps.shift[t] = uint8_t((window + 1) * 16 - end);
  }
  return steps;
}

}  // namespace

std::string trellis_name(const Trellis& trellis) {
  return "EXL3-" + std::to_string(trellis.steps.bits) + "-" + NAMES[size_t(trellis.code_book)];
}

std::optional<Trellis> trellis_named(const std::string& format) {
  for (size_t bits = 1; bits <= TRELLIS_BITS; ++bits)
    for (size_t book = 0; book < CODE_BOOKS; ++book)
      if (Trellis found = {CodeBook(book), steps_of(bits), {}, {}}; trellis_name(found) == format) return found;
  return std::nullopt;
}

void pack_tiles(size_t bits, const uint8_t* from, size_t tiles, std::byte* panel) {
  for (size_t tile = 0; tile < tiles; ++tile, from += bits * 32, panel += bits * 32)
    for (size_t word = 0; word < bits; ++word)
      for (size_t lane = 0; lane < 16; ++lane)  // a checkpoint's words have 32 bits, the first of them on top
        std::memcpy(panel + (word * 16 + lane) * 2, from + ((lane * bits + word) ^ 1) * 2, 2);
}

}  // namespace penstock
