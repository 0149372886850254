// 16 lanes in plain C++.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace penstock {
namespace {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
constexpr size_t ROWS = 2, PLAIN_ROWS = 4;  // per tile with codes, with floats: all that registers hold
constexpr size_t QUERIES = 4, MIXED = 4, WIDE = 1;  // queries scored and mixed in one pass, vectors of values per pass

template <class V, class Lane>
V each(Lane lane) {
  V out;
  for (int i = 0; i < 16; ++i) out.v[i] = lane(i);
  return out;
}

inline F all(float x) {
  return each<F>([=](int) { return x; });
}
inline F zero() { return all(0.0f); }
inline F load_some(const float* p, size_t n) {
  return each<F>([=](int i) { return size_t(i) < n ? p[i] : 0.0f; });
}
inline F load(const float* p) {
  return each<F>([=](int i) { return p[i]; });
}
inline F load(const uint16_t* half) {
  return each<F>([=](int i) { return from_half(half[i]); });
}
// 16 floats of 8 bits: see from_e4m3 and from_e8m0.
inline F load_e4m3(const uint8_t* p) {
  return each<F>([=](int i) { return from_e4m3(p[i]); });
}
inline F load_e8m0(const uint8_t* p) {
  return each<F>([=](int i) { return from_e8m0(p[i]); });
}
inline F even_bfloats(const uint16_t* pairs) {
  return each<F>([=](int i) { return from_bfloat(pairs[2 * i]); });
}
inline F odd_bfloats(const uint16_t* pairs) {
  return each<F>([=](int i) { return from_bfloat(pairs[2 * i + 1]); });
}
inline void store_some(float* p, F x, size_t n) { std::memcpy(p, x.v, n * sizeof(float)); }
inline void store(float* p, F x) { store_some(p, x, 16); }
inline void store(uint16_t* half, F x) {
  for (int i = 0; i < 16; ++i) half[i] = to_half(x.v[i]);
}

inline F add(F x, F y) {
  return each<F>([&](int i) { return x.v[i] + y.v[i]; });
}
inline F sub(F x, F y) {
  return each<F>([&](int i) { return x.v[i] - y.v[i]; });
}
inline F mul(F x, F y) {
  return each<F>([&](int i) { return x.v[i] * y.v[i]; });
}
inline F div(F x, F y) {
  return each<F>([&](int i) { return x.v[i] / y.v[i]; });
}
inline F fma(F x, F y, F z) {
  return each<F>([&](int i) { return x.v[i] * y.v[i] + z.v[i]; });
}
inline F max(F x, F y) {
  return each<F>([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; });
}
inline F min(F x, F y) {
  return each<F>([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; });
}
inline F abs(F x) {
  return each<F>([&](int i) { return std::fabs(x.v[i]); });
}
inline F round(F x) {
  return each<F>([&](int i) { return std::nearbyint(x.v[i]); });
}
inline F times_pow2(F x, F n) {
  return each<F>([&](int i) { return std::ldexp(x.v[i], int(n.v[i])); });
}
inline F zero_below(F a, F x, float limit) {
  return each<F>([&](int i) { return x.v[i] >= limit ? a.v[i] : 0.0f; });
}
inline float sum(F x) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
  return x.v[0];
}
inline float maximum(F x) {
  float best = x.v[0];
  for (float value : x.v) best = value > best ? value : best;
  return best;
}

inline I all(int32_t x) {
  return each<I>([=](int) { return x; });
}
inline F to_float(I x) {
  return each<F>([&](int i) { return float(x.v[i]); });
}
inline I to_int(F x) {
  return each<I>([&](int i) { return int32_t(std::nearbyint(x.v[i])); });
}
inline I add(I x, I y) {
  return each<I>([&](int i) { return x.v[i] + y.v[i]; });
}
inline int32_t sum(I x) {
  int32_t total = 0;
  for (int32_t value : x.v) total += value;
  return total;
}
inline void store_bytes(int8_t* p, I x) {
  for (int i = 0; i < 16; ++i) p[i] = int8_t(x.v[i]);
}

// 16 bytes of two numbers each: the low one is 8 too high, the high one has a sign.
struct Nibbles {
  F low, high;
};
inline Nibbles load_nibbles(const int8_t* p) {
  return {each<F>([=](int i) { return float((p[i] & 15) - 8); }), each<F>([=](int i) { return float(p[i] >> 4); })};
}

// Codes of one group of 16 rows.
struct Codes {
  int8_t v[64];
};
struct Four {
  int8_t v[4];
};
constexpr bool SIGNED_BYTES = true;
template <class Byte>
Codes each_byte(Byte byte) {
  Codes out;
  for (int i = 0; i < 64; ++i) out.v[i] = int8_t(byte(i));
  return out;
}
inline Codes load_codes(const std::byte* p) {
  return each_byte([=](int i) { return p[i]; });
}
template <int SHIFT, int BITS>
Codes field(const Codes& x) {
  return each_byte([&](int i) { return uint8_t(x.v[i]) >> SHIFT & ((1 << BITS) - 1); });
}
template <int SHIFT>
Codes join(const Codes& low, const Codes& high) {
  return each_byte([&](int i) { return low.v[i] | high.v[i] << SHIFT; });
}
// Not inlined: the rest of a loop would be unrolled with it.
[[gnu::noinline]] Codes lookup(const Codes& codes, const int8_t* table) {
  return each_byte([&](int i) { return table[codes.v[i]]; });
}
inline Codes centered(const Codes& codes, int zero) {
  return each_byte([&](int i) { return codes.v[i] - zero; });
}
inline F load(const int8_t* p) {
  return each<F>([=](int i) { return float(p[i]); });
}
inline Four spread(const int8_t* x, size_t group) {
  x += group * 4;
  return {{x[0], x[1], x[2], x[3]}};
}
template <bool SIGNED>
I dot(I sums, const Codes& codes, const Four& x) {
  for (int i = 0; i < 64; ++i) sums.v[i / 4] += codes.v[i] * x.v[i % 4];
  return sums;
}

}  // namespace
}  // namespace penstock
