// How 16 groups of values at once become blocks of each format: compiled for several instruction sets. Nothing here may
// depend on which, so that all of them give the same bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "half.h"
#include "quantize.h"

namespace penstock {

namespace {

// One number of each of 16 groups: every operation below works on all of them at once.
constexpr size_t GROUPS = 16;
using Row = float __attribute__((vector_size(4 * GROUPS)));

constexpr float TINY = 1e-30f;

inline Row all(float value) { return Row{} + value; }

inline Row least(const Row& a, const Row& b) { return a < b ? a : b; }

inline Row most(const Row& a, const Row& b) { return a > b ? a : b; }

inline Row inverse(const Row& values, float of = 1) {
  return ((values > TINY) | (values < -TINY)) ? of / values : Row{};
}

inline Row nearest(const Row& values, float low, float high) {
  constexpr float MAGIC = 0x1.8p23f;  // its addition drops fractions
  return least(most((values + MAGIC) - MAGIC, all(low)), all(high));
}

inline Row halves(const Row& values) {
  Row kept;
  for (size_t g = 0; g < GROUPS; ++g) kept[g] = from_half(to_half(values[g]));
  return kept;
}

template <size_t N>
struct Groups {
  Row x[N], weight[N];
  Row low, high;

  explicit Groups(const float* values) {
    for (size_t j = 0; j < N; ++j)
      for (size_t g = 0; g < GROUPS; ++g) x[j][g] = values[g * N + j] + 0.0f;  // zeros have no sign
    low = high = x[0];
    for (size_t j = 1; j < N; ++j) low = least(x[j], low), high = most(x[j], high);
    std::fill_n(weight, N, all(1));
  }
};

struct Range {
  Row scale, minimum;
};

template <size_t N>
Range fit_range(const Groups<N>& groups, float top, bool is_signed) {
  const Row low = is_signed ? groups.low : least(groups.low, Row{});
  const Row span = groups.high - low;
  Row weights{}, sum_x{}, sum_xx{};
  for (size_t j = 0; j < N; ++j) {
    const Row weighed = groups.weight[j] * groups.x[j];
    weights += groups.weight[j], sum_x += weighed, sum_xx += weighed * groups.x[j];
  }
  Range found = {span / top, low};
  Row smallest = all(std::numeric_limits<float>::infinity());
  for (int step = -10; step <= 10; ++step) {
    const Row cuts = inverse(span, top + float(0.1 * step));
    Row sum_c{}, sum_cc{}, sum_cx{};
    for (size_t j = 0; j < N; ++j) {
      const Row code = nearest((groups.x[j] - low) * cuts, 0, top);
      const Row weighed = groups.weight[j] * code;
      sum_c += weighed, sum_cc += weighed * code, sum_cx += weighed * groups.x[j];
    }
    const Row spread = weights * sum_cc - sum_c * sum_c;
    Row b = (sum_cc * sum_x - sum_c * sum_cx) * inverse(spread);
    if (!is_signed) b = least(b, Row{});
    const Row a = (sum_cx - b * sum_c) * inverse(sum_cc);
    const Row error = sum_xx + b * b * weights - a * sum_cx - b * sum_x - b * (sum_x - a * sum_c);
    const auto better = (spread > TINY) & (error < smallest);
    found = {better ? a : found.scale, better ? b : found.minimum};
    smallest = better ? error : smallest;
  }
  return found;
}

template <size_t N>
Row fit_scale(const Groups<N>& groups, float limit) {
  const Row extreme = groups.high > -groups.low ? groups.high : groups.low;
  Row scale{}, best{};
  for (int step = -9; step <= 9; ++step) {
    const Row cuts = inverse(extreme, -(limit + float(0.1 * step)));
    Row sum_cc{}, sum_cx{};
    for (size_t j = 0; j < N; ++j) {
      const Row code = nearest(groups.x[j] * cuts, -limit, limit - 1);
      const Row weighed = groups.weight[j] * code;
      sum_cc += weighed * code, sum_cx += weighed * groups.x[j];
    }
    const Row a = sum_cx * inverse(sum_cc), gain = a * sum_cx;
    const auto better = gain > best;
    scale = better ? a : scale;
    best = better ? gain : best;
  }
  return scale;
}

// ---- groups that share factors: those of one block lie side by side ----

// What `each` of the groups of a block make together, for all of them.
template <size_t BLOCK_GROUPS, class Combine>
Row together(const Row& each, Combine combine) {
  Row result;
  for (size_t first = 0; first < GROUPS; first += BLOCK_GROUPS) {
    float value = each[first];
    for (size_t g = first + 1; g < first + BLOCK_GROUPS; ++g) value = combine(value, each[g]);
    for (size_t g = first; g < first + BLOCK_GROUPS; ++g) result[g] = value;
  }
  return result;
}

template <size_t BLOCK_GROUPS>
Row total(const Row& each) {
  return together<BLOCK_GROUPS>(each, [](float a, float b) { return a + b; });
}

template <size_t BLOCK_GROUPS>
Row highest(const Row& each) {
  return together<BLOCK_GROUPS>(each, [](float a, float b) { return std::max(a, b); });
}

template <size_t N>
void weigh(Groups<N>& groups) {
  Row squares{};
  for (const Row& x : groups.x) squares += x * x;
  squares = total<256 / N>(squares) / 256.0f;
  Row mean;
  for (size_t g = 0; g < GROUPS; ++g) mean[g] = 1.5f * std::sqrt(squares[g]);
  for (size_t j = 0; j < N; ++j) groups.weight[j] = mean + most(groups.x[j], -groups.x[j]);
}

struct Factors {
  Row d, m, scales, minima;
};

inline Row k_code(const Row& x, const Row& minimum, const Row& finer, float top) {
  return nearest((x + minimum) * finer, 0, top);
}

void try_nearby(const Groups<32>& groups, Factors& factors, float top) {
  const Row scales = factors.scales, minima = factors.minima;
  Row smallest = all(std::numeric_limits<float>::infinity());
  for (const float more : {0.0f, -1.0f, 1.0f})
    for (const float deeper : {0.0f, -1.0f, 1.0f}) {
      const Row s = least(most(scales + more, Row{}), all(63)), n = least(most(minima + deeper, Row{}), all(63));
      const Row scale = factors.d * s, minimum = factors.m * n, finer = inverse(scale);
      Row wrong{};
      for (size_t j = 0; j < 32; ++j) {
        const Row error = scale * k_code(groups.x[j], minimum, finer, top) - minimum - groups.x[j];
        wrong += groups.weight[j] * error * error;
      }
      const auto better = wrong < smallest;
      factors.scales = better ? s : factors.scales;
      factors.minima = better ? n : factors.minima;
      smallest = better ? wrong : smallest;
    }
}

void refit(const Groups<32>& groups, Factors& factors, float top) {
  const Row minimum = factors.m * factors.minima, finer = inverse(factors.d * factors.scales);
  Row uu{}, un{}, nn{}, ux{}, nx{};
  for (size_t j = 0; j < 32; ++j) {
    const Row u = factors.scales * k_code(groups.x[j], minimum, finer, top);
    const Row wu = groups.weight[j] * u, wn = groups.weight[j] * factors.minima;
    uu += wu * u, un += wu * factors.minima, nn += wn * factors.minima;
    ux += wu * groups.x[j], nx += wn * groups.x[j];
  }
  uu = total<8>(uu), un = total<8>(un), nn = total<8>(nn), ux = total<8>(ux), nx = total<8>(nx);
  const Row spread = uu * nn - un * un;
  const Row d = (nn * ux - un * nx) * inverse(spread), m = (un * ux - uu * nx) * inverse(spread);
  const auto clear = (spread > 1e-4f * (uu * nn)) & (d > 0.0f) & (m > 0.0f);
  factors.d = halves(clear ? d : factors.d);
  factors.m = halves(clear ? m : factors.m);
}

// ---- bytes ----

using Codes = std::array<std::array<uint8_t, 32>, GROUPS>;  // groups of 32

template <class Code>
Codes codes_of(Code code) {  // place j in every group
  Codes codes;
  for (size_t j = 0; j < 32; ++j) {
    const Row row = code(j);
    for (size_t g = 0; g < GROUPS; ++g) codes[g][j] = uint8_t(row[g]);
  }
  return codes;
}

void put_half(uint8_t* out, float value) {
  const uint16_t bits = to_half(value);
  std::memcpy(out, &bits, 2);
}

void put_nibbles(uint8_t* out, const uint8_t* low, const uint8_t* high, size_t count) {
  for (size_t j = 0; j < count; ++j) out[j] = uint8_t((low[j] & 15) | (high[j] & 15) << 4);
}

void put_fifth_bits(uint8_t* out, const uint8_t* codes) {
  for (size_t j = 0; j < 32; ++j) out[j / 8] |= uint8_t(codes[j] >> 4 << j % 8);
}

template <int BITS>
void scaled(const float* values, uint8_t* out) {
  constexpr float LIMIT = 1 << (BITS - 1);
  constexpr size_t HEAD = BITS == 5 ? 6 : 2;
  const Groups<32> groups(values);
  const Row scale = halves(fit_scale(groups, LIMIT)), finer = inverse(scale);
  const Codes codes = codes_of([&](size_t j) { return nearest(groups.x[j] * finer, -LIMIT, LIMIT - 1) + LIMIT; });
  for (size_t g = 0; g < GROUPS; ++g, out += HEAD + 16) {
    put_half(out, scale[g]);
    if (BITS == 5) put_fifth_bits(out + 2, codes[g].data());
    put_nibbles(out + HEAD, codes[g].data(), codes[g].data() + 16, 16);
  }
}

template <int BITS>
void ranged(const float* values, uint8_t* out) {
  constexpr float TOP = (1 << BITS) - 1;
  constexpr size_t HEAD = BITS == 5 ? 8 : 4;
  const Groups<32> groups(values);
  const Range found = fit_range(groups, TOP, true);
  const Row scale = halves(found.scale), minimum = halves(found.minimum), finer = inverse(scale);
  const Codes codes = codes_of([&](size_t j) { return nearest((groups.x[j] - minimum) * finer, 0, TOP); });
  for (size_t g = 0; g < GROUPS; ++g, out += HEAD + 16) {
    put_half(out, scale[g]);
    put_half(out + 2, minimum[g]);
    if (BITS == 5) put_fifth_bits(out + 4, codes[g].data());
    put_nibbles(out + HEAD, codes[g].data(), codes[g].data() + 16, 16);
  }
}

void q8_0(const float* values, uint8_t* out) {
  const Groups<32> groups(values);
  const Row scale = halves(most(-groups.low, groups.high) / 127.0f), finer = inverse(scale);
  for (size_t g = 0; g < GROUPS; ++g) put_half(out + g * 34, scale[g]);
  for (size_t j = 0; j < 32; ++j) {
    const Row code = nearest(groups.x[j] * finer, -127, 127);
    for (size_t g = 0; g < GROUPS; ++g) out[g * 34 + 2 + j] = uint8_t(int8_t(code[g]));
  }
}

void put_pairs(uint8_t* out, const Factors& factors, size_t first) {
  for (size_t i = 0; i < 4; ++i) {
    const auto scale = uint8_t(factors.scales[first + i]), minimum = uint8_t(factors.minima[first + i]);
    const auto scale_4 = uint8_t(factors.scales[first + i + 4]), minimum_4 = uint8_t(factors.minima[first + i + 4]);
    out[i] = uint8_t(scale | scale_4 >> 4 << 6);
    out[i + 4] = uint8_t(minimum | minimum_4 >> 4 << 6);
    out[i + 8] = uint8_t((scale_4 & 15) | (minimum_4 & 15) << 4);
  }
}

template <int BITS>
void k_blocks(const float* values, uint8_t* out) {
  constexpr float TOP = (1 << BITS) - 1;
  constexpr size_t HEAD = BITS == 5 ? 48 : 16;
  Groups<32> groups(values);
  weigh(groups);
  const Range found = fit_range(groups, TOP, false);
  const Row depth = 0.0f - found.minimum;
  Factors factors = {halves(highest<8>(found.scale) / 63.0f), halves(highest<8>(depth) / 63.0f), {}, {}};
  factors.scales = nearest(found.scale * inverse(factors.d), 0, 63);
  factors.minima = nearest(depth * inverse(factors.m), 0, 63);
  try_nearby(groups, factors, TOP);
  refit(groups, factors, TOP);
  const Row taken = factors.m * factors.minima, finer = inverse(factors.d * factors.scales);
  const Codes codes = codes_of([&](size_t j) { return k_code(groups.x[j], taken, finer, TOP); });
  for (size_t first = 0; first < GROUPS; first += 8, out += HEAD + 128) {
    put_half(out, factors.d[first]);
    put_half(out + 2, factors.m[first]);
    put_pairs(out + 4, factors, first);
    for (size_t i = 0; i < 4; ++i)
      put_nibbles(out + HEAD + i * 32, codes[first + 2 * i].data(), codes[first + 2 * i + 1].data(), 32);
    if (BITS == 5)
      for (size_t g = 0; g < 8; ++g)
        for (size_t j = 0; j < 32; ++j) out[16 + j] |= uint8_t(codes[first + g][j] >> 4 << g);
  }
}

void q6_k(const float* values, uint8_t* out) {
  Groups<16> groups(values);
  weigh(groups);
  const Row scale = fit_scale(groups, 32), high = highest<16>(scale), low = -highest<16>(-scale);
  Row d = halves((high > -low ? high : low) / -128.0f);
  const Row scales = nearest(scale * inverse(d), -128, 127);
  Row finer = inverse(d * scales), uu{}, ux{};
  for (size_t j = 0; j < 16; ++j) {
    const Row u = scales * nearest(groups.x[j] * finer, -32, 31), weighed = groups.weight[j] * u;
    uu += weighed * u, ux += weighed * groups.x[j];
  }
  uu = total<16>(uu), ux = total<16>(ux);
  d = halves(uu > TINY ? ux * inverse(uu) : d);
  finer = inverse(d * scales);
  uint8_t codes[256];
  for (size_t j = 0; j < 16; ++j) {
    const Row code = nearest(groups.x[j] * finer, -32, 31) + 32.0f;
    for (size_t g = 0; g < GROUPS; ++g) codes[g * 16 + j] = uint8_t(code[g]);
  }
  for (size_t i = 0; i < 2; ++i) {
    const uint8_t* side = codes + i * 128;
    put_nibbles(out + i * 64, side, side + 64, 64);
    for (size_t j = 0; j < 32; ++j)
      out[128 + i * 32 + j] = uint8_t(side[j] >> 4 | side[j + 32] >> 4 << 2 | side[j + 64] >> 4 << 4 | side[j + 96] >> 4 << 6);
  }
  for (size_t g = 0; g < GROUPS; ++g) out[192 + g] = uint8_t(int8_t(scales[g]));
  put_half(out + 208, d[0]);
}

constexpr Coder CODERS[] = {
    {"Q4_0", 32, 18, 16, scaled<4>},   {"Q4_1", 32, 20, 16, ranged<4>},    {"Q5_0", 32, 22, 16, scaled<5>},
    {"Q5_1", 32, 24, 16, ranged<5>},   {"Q8_0", 32, 34, 16, q8_0},         {"Q4_K", 256, 144, 2, k_blocks<4>},
    {"Q5_K", 256, 176, 2, k_blocks<5>}, {"Q6_K", 256, 210, 1, q6_k},
};

}  // namespace

}  // namespace penstock
