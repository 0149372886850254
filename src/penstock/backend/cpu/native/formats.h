// How values are stored: weights as they lie in a checkpoint, activations as the integer kernels read them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

enum class Format : uint8_t { F32, F16, BF16, Q4_0, Q4_1, Q8_0 };
inline constexpr size_t FORMATS = 6;

inline constexpr size_t BLOCK = 32;  // values that share a scale

struct BlockQ4_0 {  // value j is d * (nibble - 8); byte j holds values j and j + 16
  uint16_t d;
  uint8_t q[16];
};
static_assert(sizeof(BlockQ4_0) == 18);

struct BlockQ4_1 {  // value j is d * nibble + m
  uint16_t d, m;
  uint8_t q[16];
};
static_assert(sizeof(BlockQ4_1) == 20);

struct BlockQ8_0 {  // value j is d * q[j]
  uint16_t d;
  int8_t q[32];
};
static_assert(sizeof(BlockQ8_0) == 34);

struct CodeBlock {  // 32 activations: scale * q[j]
  float scale;
  float sum;       // scale * sum(q): what a minimum of the weights is multiplied by
  int32_t offset;  // -128 * sum(q): undoes weights stored 128 too high
  int8_t q[32];
};
static_assert(sizeof(CodeBlock) == 44);

}  // namespace penstock
