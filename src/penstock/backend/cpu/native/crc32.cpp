#include "crc32.h"

#include <array>
#include <cstring>

#include "cpu_features.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#endif

namespace penstock {

namespace {

constexpr uint32_t POLYNOMIAL = 0xEDB88320;  // the lowest bit stands for the highest power of x

constexpr uint32_t times_x(uint32_t value) { return (value >> 1) ^ (value & 1 ? POLYNOMIAL : 0); }

constexpr std::array<uint32_t, 256> TABLE = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    table[byte] = byte;
    for (int bit = 0; bit < 8; ++bit) table[byte] = times_x(table[byte]);
  }
  return table;
}();

// States are CRCs before their bits are inverted.
uint32_t advance(uint32_t state, const std::byte* data, size_t size) {
  for (size_t i = 0; i < size; ++i) state = (state >> 8) ^ TABLE[(state ^ uint32_t(data[i])) & 0xFF];
  return state;
}

#if defined(__x86_64__)

constexpr size_t LANE = sizeof(__m128i), LANES = 4, STRIDE = LANE * LANES;

// What 64 bits are multiplied with to have the same remainder so many bits further on. A product of reflected numbers
// is one bit short.
constexpr int64_t factor(int bits) {
  uint32_t value = 0x80000000;
  for (int i = 0; i < bits; ++i) value = times_x(value);
  return int64_t(uint64_t(value) << 1);
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i load(const std::byte* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Moves 128 bits on, to where `next` is, and adds that.
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i value, __m128i factors, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Of at least one stride. What is left after whole lanes has the remainder of all data: its last lane takes the place
// of what came before.
__attribute__((target("pclmul,sse4.1"))) uint32_t advance_by_lanes(uint32_t state, const std::byte* data, size_t size) {
  constexpr int FAR = 8 * STRIDE, NEAR = 8 * LANE;
  const __m128i far = _mm_set_epi64x(factor(FAR - 32), factor(FAR + 32));
  const __m128i near = _mm_set_epi64x(factor(NEAR - 32), factor(NEAR + 32));
  __m128i lanes[LANES];
  for (size_t i = 0; i < LANES; ++i) lanes[i] = load(data + i * LANE);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(int(state)));
  size_t at = STRIDE;
  for (; at + STRIDE <= size; at += STRIDE)
    for (size_t i = 0; i < LANES; ++i) lanes[i] = fold(lanes[i], far, load(data + at + i * LANE));
  __m128i all = lanes[0];
  for (size_t i = 1; i < LANES; ++i) all = fold(all, near, lanes[i]);
  for (; at + LANE <= size; at += LANE) all = fold(all, near, load(data + at));
  std::byte last[LANE];
  std::memcpy(last, &all, LANE);
  return advance(advance(0, last, LANE), data + at, size - at);
}

#elif defined(__aarch64__)

__attribute__((target("+crc"))) uint32_t advance_by_words(uint32_t state, const std::byte* data, size_t size) {
  size_t at = 0;
  for (; at + sizeof(uint64_t) <= size; at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, data + at, sizeof word);
    state = __crc32d(state, word);
  }
  return advance(state, data + at, size - at);
}

#endif

}  // namespace

bool has_fast_crc32() {
#if defined(__x86_64__)
  static const bool found = has_carryless_product();  // to ask a virtual CPU takes as long as to sum 500 kB
  return found;
#elif defined(__aarch64__)
  return has_crc32();
#else
  return false;
#endif
}

uint32_t crc32(std::span<const std::byte> data, uint32_t start) {
#if defined(__x86_64__)
  if (data.size() >= STRIDE && has_fast_crc32()) return ~advance_by_lanes(~start, data.data(), data.size());
#elif defined(__aarch64__)
  if (has_fast_crc32()) return ~advance_by_words(~start, data.data(), data.size());
#endif
  return ~advance(~start, data.data(), data.size());
}

}  // namespace penstock
