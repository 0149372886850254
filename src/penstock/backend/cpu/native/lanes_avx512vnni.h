// 16 lanes in one register: AVX-512 with VNNI.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock {
namespace {

using F = __m512;
using I = __m512i;
#define UNROLLED
constexpr size_t ROWS = 8, PLAIN_ROWS = 8;  // per tile with codes, with floats: all that registers hold
constexpr size_t QUERIES = 8, MIXED = 4, WIDE = 4;  // queries scored and mixed in one pass, vectors of values per pass

inline __mmask16 first(size_t n) { return __mmask16((1u << n) - 1); }

inline F zero() { return _mm512_setzero_ps(); }
inline F all(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const uint16_t* half) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)half)); }
inline F even_bfloats(const uint16_t* pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}
inline F odd_bfloats(const uint16_t* pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(int(0xffff0000))));
}
// 16 floats of 8 bits: see from_e4m3 and from_e8m0.
inline F load_e4m3(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 7));
}
inline F load_e8m0(const uint8_t* p) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
  return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x400000)));
}
inline F load_some(const float* p, size_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void store(uint16_t* half, F x) {
  _mm256_storeu_si256((__m256i*)half, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_some(float* p, F x, size_t n) { _mm512_mask_storeu_ps(p, first(n), x); }

inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F times_pow2(F a, F n) { return _mm512_scalef_ps(a, n); }
inline F zero_below(F a, F x, float limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(limit), _CMP_GE_OQ), a);
}
inline float sum(F a) { return _mm512_reduce_add_ps(a); }
inline float maximum(F a) { return _mm512_reduce_max_ps(a); }

inline I all(int32_t x) { return _mm512_set1_epi32(x); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline int32_t sum(I a) { return _mm512_reduce_add_epi32(a); }
inline I to_int(F a) { return _mm512_cvtps_epi32(a); }
inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
inline void store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }

// 16 bytes of two numbers each: the low one is 8 too high, the high one has a sign.
struct Nibbles {
  F low, high;
};
inline Nibbles load_nibbles(const int8_t* p) {
  const __m512i bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm512_permutexvar_ps(bytes, table), to_float(_mm512_srai_epi32(bytes, 4))};
}

// Codes of one group of 16 rows. Unsigned bytes times signed bytes is what the instruction offers: numbers with a sign
// are kept 128 too high.
using Codes = __m512i;
using Four = __m512i;
constexpr bool SIGNED_BYTES = false;
inline Codes load_codes(const std::byte* p) { return _mm512_loadu_si512(p); }
template <int SHIFT, int BITS>
Codes field(Codes x) {
  if constexpr (SHIFT) x = _mm512_srli_epi16(x, SHIFT);
  return BITS == 8 ? x : _mm512_and_si512(x, _mm512_set1_epi8(char((1 << BITS) - 1)));
}
template <int SHIFT>
Codes join(Codes low, Codes high) {
  return _mm512_or_si512(low, _mm512_slli_epi16(high, SHIFT));
}
inline Codes lookup(Codes codes, const int8_t* table) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), codes);
}
inline Codes centered(Codes codes, int zero) { return _mm512_add_epi8(codes, _mm512_set1_epi8(char(128 - zero))); }
inline F load(const int8_t* p) { return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline Four spread(const int8_t* x, size_t group) {
  int32_t four;
  std::memcpy(&four, x + group * 4, 4);
  return _mm512_set1_epi32(four);
}
template <bool SIGNED>
I dot(I sums, Codes codes, Four x) {
  return _mm512_dpbusd_epi32(sums, codes, x);
}

}  // namespace
}  // namespace penstock
