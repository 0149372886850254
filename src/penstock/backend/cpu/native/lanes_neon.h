// 16 lanes in four registers: NEON with the 8-bit dot product.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock {
namespace {

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
#define UNROLLED
constexpr size_t ROWS = 3, PLAIN_ROWS = 2;  // per tile with codes, with floats: all that registers hold
constexpr size_t QUERIES = 2, MIXED = 4, WIDE = 1;  // queries scored and mixed in one pass, vectors of values per pass

template <class V, class Quarter>
[[gnu::always_inline]] inline V each(Quarter quarter) {
  return {{quarter(0), quarter(1), quarter(2), quarter(3)}};
}

inline F all(float x) {
  return each<F>([=](int) { return vdupq_n_f32(x); });
}
inline F zero() { return all(0.0f); }
inline F load(const float* p) {
  return each<F>([=](int i) { return vld1q_f32(p + i * 4); });
}
inline F load(const uint16_t* half) {
  return each<F>([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half + i * 4))); });
}
inline F even_bfloats(const uint16_t* pairs) {
  return each<F>([=](int i) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(pairs + i * 8)), 16));
  });
}
inline F odd_bfloats(const uint16_t* pairs) {
  const uint32x4_t mask = vdupq_n_u32(0xffff0000);
  return each<F>([=](int i) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(pairs + i * 8)), mask));
  });
}
// 16 floats of 8 bits: see from_e4m3 and from_e8m0.
inline F load_e4m3(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t halves[2] = {vshll_n_u8(vget_low_u8(bytes), 7), vshll_n_u8(vget_high_u8(bytes), 7)};
  return each<F>([&](int i) {
    const uint16x4_t four = i % 2 ? vget_high_u16(halves[i / 2]) : vget_low_u16(halves[i / 2]);
    return vcvt_f32_f16(vreinterpret_f16_u16(four));
  });
}
inline F load_e8m0(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t halves[2] = {vshll_n_u8(vget_low_u8(bytes), 7), vshll_n_u8(vget_high_u8(bytes), 7)};
  return each<F>([&](int i) {
    const uint16x4_t four = i % 2 ? vget_high_u16(halves[i / 2]) : vget_low_u16(halves[i / 2]);
    return vreinterpretq_f32_u32(vmaxq_u32(vshll_n_u16(four, 16), vdupq_n_u32(0x400000)));
  });
}
inline F load_some(const float* p, size_t n) {
  if (n == 16) return load(p);
  float sixteen[16] = {};
  std::memcpy(sixteen, p, n * sizeof(float));
  return load(sixteen);
}
inline void store(float* p, F x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + i * 4, x.v[i]);
}
inline void store(uint16_t* half, F x) {
  for (int i = 0; i < 4; ++i) vst1_u16(half + i * 4, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
inline void store_some(float* p, F x, size_t n) {
  if (n == 16) return store(p, x);
  float sixteen[16];
  store(sixteen, x);
  std::memcpy(p, sixteen, n * sizeof(float));
}

inline F add(F x, F y) {
  return each<F>([&](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
inline F sub(F x, F y) {
  return each<F>([&](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
inline F mul(F x, F y) {
  return each<F>([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
inline F div(F x, F y) {
  return each<F>([&](int i) { return vdivq_f32(x.v[i], y.v[i]); });
}
inline F fma(F x, F y, F z) {
  return each<F>([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
// Of two that do not compare the second, as on other CPUs: the instructions for max and min would hand on a NaN.
inline F max(F x, F y) {
  return each<F>([&](int i) { return vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
inline F min(F x, F y) {
  return each<F>([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
inline F abs(F x) {
  return each<F>([&](int i) { return vabsq_f32(x.v[i]); });
}
inline F round(F x) {
  return each<F>([&](int i) { return vrndnq_f32(x.v[i]); });
}
inline float32x4_t pow2(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
inline F times_pow2(F x, F n) {
  return each<F>([&](int i) { return vmulq_f32(x.v[i], pow2(n.v[i])); });
}
inline F zero_below(F v, F x, float limit) {
  return each<F>([&](int i) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v.v[i]), vcgeq_f32(x.v[i], vdupq_n_f32(limit))));
  });
}
inline float sum(F x) {  // in the order of the other CPUs
  const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float maximum(F x) {
  return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x.v[0], x.v[1]), vmaxnmq_f32(x.v[2], x.v[3])));
}

inline I all(int32_t x) {
  return each<I>([=](int) { return vdupq_n_s32(x); });
}
inline F to_float(I x) {
  return each<F>([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline I to_int(F x) {
  return each<I>([&](int i) { return vcvtnq_s32_f32(x.v[i]); });
}
inline I add(I x, I y) {
  return each<I>([&](int i) { return vaddq_s32(x.v[i], y.v[i]); });
}
inline int32_t sum(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3]))); }
inline void store_bytes(int8_t* p, I x) {
  const int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

// Codes of one group of 16 rows.
struct Codes {
  uint8x16_t v[4];
};
struct Four {  // a lane of a register, which the instruction takes as it is
  int8x16_t sixteen;
  size_t lane;
};
constexpr bool SIGNED_BYTES = true;
inline Codes load_codes(const std::byte* p) {
  return each<Codes>([=](int i) { return vld1q_u8((const uint8_t*)p + i * 16); });
}
template <int SHIFT, int BITS>
uint8x16_t field_of(uint8x16_t x) {
  if constexpr (SHIFT) x = vshrq_n_u8(x, SHIFT);
  return SHIFT + BITS == 8 ? x : vandq_u8(x, vdupq_n_u8((1 << BITS) - 1));
}
template <int SHIFT, int BITS>
Codes field(Codes x) {
  return each<Codes>([&](int i) { return field_of<SHIFT, BITS>(x.v[i]); });
}
template <int SHIFT>
Codes join(Codes low, Codes high) {
  return each<Codes>([&](int i) { return vsliq_n_u8(low.v[i], high.v[i], SHIFT); });
}
inline Codes lookup(Codes codes, const int8_t* table) {
  const uint8x16_t values = vld1q_u8((const uint8_t*)table);
  return each<Codes>([&](int i) { return vqtbl1q_u8(values, codes.v[i]); });
}
inline Codes centered(Codes codes, int zero) {
  return each<Codes>([&](int i) { return vsubq_u8(codes.v[i], vdupq_n_u8(uint8_t(zero))); });
}
inline F widened(int8x16_t bytes) {
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return to_float({{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
                    vmovl_s16(vget_high_s16(high))}});
}
inline F load(const int8_t* p) { return widened(vld1q_s8(p)); }
// 16 bytes of two numbers each: the low one is 8 too high, the high one has a sign.
struct Nibbles {
  F low, high;
};
inline Nibbles load_nibbles(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int8x16_t low = vsubq_s8(vandq_s8(bytes, vdupq_n_s8(15)), vdupq_n_s8(8));
  return {widened(low), widened(vshrq_n_s8(bytes, 4))};
}
inline Four spread(const int8_t* x, size_t group) { return {vld1q_s8(x + group / 4 * 16), group % 4}; }
template <int LANE>
I dot_lane(I sums, Codes codes, int8x16_t x) {
  return each<I>([&](int i) { return vdotq_laneq_s32(sums.v[i], vreinterpretq_s8_u8(codes.v[i]), x, LANE); });
}
template <bool SIGNED>
I dot(I sums, Codes codes, Four x) {
  if (x.lane == 0) return dot_lane<0>(sums, codes, x.sixteen);
  if (x.lane == 1) return dot_lane<1>(sums, codes, x.sixteen);
  if (x.lane == 2) return dot_lane<2>(sums, codes, x.sixteen);
  return dot_lane<3>(sums, codes, x.sixteen);
}

}  // namespace
}  // namespace penstock
