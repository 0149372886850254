// 16-bit floats, one at a time, on any CPU.
#pragma once

#include <bit>
#include <cstdint>

namespace penstock {

inline float from_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16;
  const uint32_t body = half & 0x7fff;
  if (body >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (body & 0x3ff) << 13);
  if (body >= 0x400) return std::bit_cast<float>(sign | ((body << 13) + (112u << 23)));
  const float tiny = float(body) * 0x1p-24f;
  return sign ? -tiny : tiny;
}

inline uint16_t to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t body = bits & 0x7fffffff;
  if (body > 0x7f800000) return sign | 0x7e00;
  if (body >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or more
  if (body < 0x38800000) {                       // below the smallest normal: let the addition round
    const float aligned = std::bit_cast<float>(body) + 0.5f;
    return uint16_t(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000));
  }
  const uint32_t rounded = body + 0xfff + (body >> 13 & 1);
  return uint16_t(sign | ((rounded - (112u << 23)) >> 13));
}

// The 256th of a float of 8 bits, 4 of them exponent and 3 mantissa, without a sign (e4m3). A half float with the same
// bits has the exponent's bias of 15 instead of 7.
inline float from_e4m3(uint8_t code) { return from_half(uint16_t(code << 7)); }

// A power of two, of which the 8 bits are the exponent (e8m0), with a bias of 127. The lowest is subnormal.
inline float from_e8m0(uint8_t code) { return std::bit_cast<float>(code ? uint32_t(code) << 23 : 0x400000u); }

inline float from_bfloat(uint16_t value) { return std::bit_cast<float>(uint32_t(value) << 16); }

inline uint16_t to_bfloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace penstock
