// 16 lanes in two registers: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock {
namespace {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
#define UNROLLED
constexpr size_t ROWS = 4, PLAIN_ROWS = 3;  // per tile with codes, with floats: all that registers hold
constexpr size_t QUERIES = 3, MIXED = 3, WIDE = 2;  // queries scored and mixed in one pass, vectors of values per pass

inline __m256i first(size_t n, int from) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n) - from), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F zero() { return all(0.0f); }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F load(const uint16_t* half) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)half)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(half + 8)))};
}
inline __m256 even_of(const uint16_t* pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)pairs), 16));
}
inline __m256 odd_of(const uint16_t* pairs) {
  const __m256i mask = _mm256_set1_epi32(int(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)pairs), mask));
}
inline F even_bfloats(const uint16_t* pairs) { return {even_of(pairs), even_of(pairs + 16)}; }
inline F odd_bfloats(const uint16_t* pairs) { return {odd_of(pairs), odd_of(pairs + 16)}; }
// 16 floats of 8 bits: see from_e4m3 and from_e8m0.
inline F load_e4m3(const uint8_t* p) {
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
inline __m256 widen_e8m0(const uint8_t* p) {
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
  return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x400000)));
}
inline F load_e8m0(const uint8_t* p) { return {widen_e8m0(p), widen_e8m0(p + 8)}; }
inline F load_some(const float* p, size_t n) {
  return {_mm256_maskload_ps(p, first(n, 0)), _mm256_maskload_ps(p + 8, first(n, 8))};
}
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store(uint16_t* half, F x) {
  _mm_storeu_si128((__m128i*)half, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)(half + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_some(float* p, F x, size_t n) {
  _mm256_maskstore_ps(p, first(n, 0), x.a);
  _mm256_maskstore_ps(p + 8, first(n, 8), x.b);
}

inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F round(F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 pow2(__m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline F times_pow2(F x, F n) { return {_mm256_mul_ps(x.a, pow2(n.a)), _mm256_mul_ps(x.b, pow2(n.b))}; }
inline F zero_below(F v, F x, float limit) {
  const __m256 low = _mm256_set1_ps(limit);
  return {_mm256_and_ps(v.a, _mm256_cmp_ps(x.a, low, _CMP_GE_OQ)),
          _mm256_and_ps(v.b, _mm256_cmp_ps(x.b, low, _CMP_GE_OQ))};
}
inline float sum(F x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float maximum(F x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline I all(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline int32_t sum(I x) {
  const __m256i eight = _mm256_add_epi32(x.a, x.b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline void store_bytes(int8_t* p, I x) {
  const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1)));
}

// 16 bytes of two numbers each: the low one is 8 too high, the high one has a sign.
struct Nibbles {
  F low, high;
};
inline __m256 low_nibbles(__m256i bytes) {
  const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(low, _mm256_set1_epi32(8)));
}
inline Nibbles load_nibbles(const int8_t* p) {
  const I bytes = {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                   _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
  return {{low_nibbles(bytes.a), low_nibbles(bytes.b)},
          to_float(I{_mm256_srai_epi32(bytes.a, 4), _mm256_srai_epi32(bytes.b, 4)})};
}

// Codes of one group of 16 rows.
using Codes = I;
using Four = __m256i;
constexpr bool SIGNED_BYTES = true;
inline Codes load_codes(const std::byte* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
template <int SHIFT, int BITS>
Codes field(Codes x) {
  if constexpr (SHIFT) x = {_mm256_srli_epi16(x.a, SHIFT), _mm256_srli_epi16(x.b, SHIFT)};
  if constexpr (BITS == 8) return x;
  const __m256i mask = _mm256_set1_epi8(char((1 << BITS) - 1));
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
template <int SHIFT>
Codes join(Codes low, Codes high) {
  return {_mm256_or_si256(low.a, _mm256_slli_epi16(high.a, SHIFT)),
          _mm256_or_si256(low.b, _mm256_slli_epi16(high.b, SHIFT))};
}
inline Codes lookup(Codes codes, const int8_t* table) {
  const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(values, codes.a), _mm256_shuffle_epi8(values, codes.b)};
}
inline Codes centered(Codes codes, int zero) {
  const __m256i offset = _mm256_set1_epi8(char(zero));
  return {_mm256_sub_epi8(codes.a, offset), _mm256_sub_epi8(codes.b, offset)};
}
inline F load(const int8_t* p) {
  return to_float(I{_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                    _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))});
}
inline __m256i dot_unsigned(__m256i sums, __m256i codes, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(codes, x);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline __m256i dot_signed(__m256i sums, __m256i codes, __m256i x) {
  return dot_unsigned(sums, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
}
inline Four spread(const int8_t* x, size_t group) {
  int32_t four;
  std::memcpy(&four, x + group * 4, 4);
  return _mm256_set1_epi32(four);
}
template <bool SIGNED>
I dot(I sums, Codes codes, Four x) {
  if constexpr (SIGNED) return {dot_signed(sums.a, codes.a, x), dot_signed(sums.b, codes.b, x)};
  return {dot_unsigned(sums.a, codes.a, x), dot_unsigned(sums.b, codes.b, x)};
}

// Sums of pairs stay in 16 bits until all are added.
template <bool SIGNED, bool SHORT>
struct Dots;
template <>
struct Dots<false, true> {
  I sums;
  I pairs = all(0);

  void add(Codes codes, Four x) {
    pairs.a = _mm256_add_epi16(pairs.a, _mm256_maddubs_epi16(codes.a, x));
    pairs.b = _mm256_add_epi16(pairs.b, _mm256_maddubs_epi16(codes.b, x));
  }
  I total() const {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sums.a, _mm256_madd_epi16(pairs.a, ones)),
            _mm256_add_epi32(sums.b, _mm256_madd_epi16(pairs.b, ones))};
  }
};

}  // namespace
}  // namespace penstock
