// From plain values to the bytes of a quantized format, as model/quantize.py defines it: to the bit.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace penstock {

struct Coder {
  const char* name;
  size_t values, bytes;  // per block
  size_t blocks;         // coded at once
  void (*encode)(const float* values, uint8_t* out);  // `out` is zero before
};

std::span<const Coder> generic_coders();
std::span<const Coder> avx2_coders();
std::span<const Coder> avx512_coders();

// Values of the format `from` (F32, F16 or BF16) become blocks of the format `to`. False where a value is not
// finite or beyond what float16 holds: the output is then undefined.
bool quantize(const std::string& from, std::span<const uint8_t> values, const std::string& to, std::span<uint8_t> out,
              unsigned threads, const std::string& isa);

}  // namespace penstock
