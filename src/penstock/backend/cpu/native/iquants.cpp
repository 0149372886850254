// Formats whose values, several at a time, are points of a code book; and ternary ones. model/gguf/iquants.py defines them.
#include <bit>
#include <vector>

#include "formats.h"
#include "half.h"

namespace penstock {

namespace {

constexpr uint64_t WORDS[] = {
#include "code_books.inc"
};

enum class Book { IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ3_XXS, IQ3_S };

constexpr size_t POINTS_OF_3 = 6561, POINTS_OF_8 = 4096;  // 8 values of 3 levels, 4 of 8
constexpr size_t words_for(size_t bits) { return (bits + 63) / 64; }
static_assert(std::size(WORDS) == 4 * words_for(POINTS_OF_3) + 2 * words_for(POINTS_OF_8));

std::vector<uint8_t> read_book(size_t at, size_t lattice, size_t levels, size_t values) {
  std::vector<uint8_t> found;
  for (size_t point = 0; point < lattice; ++point)
    if (WORDS[at + point / 64] >> point % 64 & 1)
      for (size_t i = 0, rest = point; i < values; ++i, rest /= levels) found.push_back(uint8_t(rest % levels));
  return found;
}

// The levels of all points in order, 8 or 4 of each.
template <Book BOOK>
const uint8_t* book() {
  constexpr size_t PLACE = size_t(BOOK), THREES = size_t(Book::IQ3_XXS);
  static const std::vector<uint8_t> levels =
      PLACE < THREES ? read_book(PLACE * words_for(POINTS_OF_3), POINTS_OF_3, 3, 8)
                     : read_book(THREES * words_for(POINTS_OF_3) + (PLACE - THREES) * words_for(POINTS_OF_8), POINTS_OF_8, 8, 4);
  return levels.data();
}

uint32_t word(const uint8_t* p) { return uint32_t(read::half(p)) | uint32_t(read::half(p + 2)) << 16; }

// Of 8 values an even number is negative, which tells the last.
uint32_t eight_signs(uint32_t seven) { return seven | uint32_t(std::popcount(seven) & 1) << 7; }

// 8 codes of a level and, in bit 2, its sign.
void with_signs(const uint8_t* levels, uint32_t signs, uint8_t* codes) {
  for (size_t i = 0; i < 8; ++i) codes[i] = uint8_t(levels[i] | (signs >> i & 1) << 2);
}

int8_t odd(uint32_t scale) { return int8_t(2 * scale + 1); }

void odd_nibbles(const uint8_t* p, size_t n, Parts& parts) {
  for (size_t i = 0; i < 2 * n; ++i) parts.scales[i] = odd(p[i / 2] >> i % 2 * 4 & 15u);
}

void ternary(uint16_t d, Parts& parts) {
  parts.d = d;
  parts.m = read::negative(d);
  std::memset(parts.scales, 1, 16);
  std::memset(parts.minima, 1, 16);
}

// Digits in base 3 of n bytes, each a fraction of 256: all first ones, then all second ones.
uint8_t* digits(const uint8_t* p, size_t n, size_t count, uint8_t* codes) {
  for (size_t k = 0, power = 1; k < count; ++k, power *= 3, codes += n)
    for (size_t j = 0; j < n; ++j) codes[j] = uint8_t(uint8_t(p[j] * power) * 3 >> 8);
  return codes;
}

}  // namespace

void IQ1_S::take(const uint8_t* p, Parts& parts) {
  parts.d = read::half(p);
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t high = read::half(p + 34 + i / 4 * 2);
    const uint32_t point = p[2 + i] | (high >> i % 4 * 3 & 7) << 8;
    parts.scales[i / 4] = odd(high >> 12 & 7);
    with_signs(book<Book::IQ1_S>() + point * 8, high >> 15 ? 255 : 0, parts.codes + i * 8);
  }
}

void IQ1_M::take(const uint8_t* p, Parts& parts) {
  for (size_t i = 0; i < 4; ++i) parts.d |= uint16_t(p[49 + i * 2] >> 4 << i * 4);
  for (size_t i = 0; i < 16; ++i) parts.scales[i] = odd(read::half(p + 48 + i / 4 * 2) >> i % 4 * 3 & 7u);
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t high = p[32 + i / 2] >> i % 2 * 4 & 15u, point = p[i] | (high & 7) << 8;
    with_signs(book<Book::IQ1_S>() + point * 8, high >> 3 ? 255 : 0, parts.codes + i * 8);
  }
}

void IQ2_XXS::take(const uint8_t* p, Parts& parts) {
  parts.d = read::half(p);
  for (size_t i = 0; i < 32; ++i) {
    const uint8_t* run = p + 2 + i / 4 * 8;
    const uint32_t signs = word(run + 4);
    parts.scales[i / 4] = odd(signs >> 28);
    with_signs(book<Book::IQ2_XXS>() + run[i % 4] * 8, eight_signs(signs >> i % 4 * 7 & 127), parts.codes + i * 8);
  }
}

void IQ2_XS::take(const uint8_t* p, Parts& parts) {
  parts.d = read::half(p);
  odd_nibbles(p + 66, 8, parts);
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t both = read::half(p + 2 + i * 2);
    with_signs(book<Book::IQ2_XS>() + (both & 511) * 8, eight_signs(both >> 9), parts.codes + i * 8);
  }
}

void IQ2_S::take(const uint8_t* p, Parts& parts) {
  parts.d = read::half(p);
  odd_nibbles(p + 74, 8, parts);
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t point = p[2 + i] | (p[66 + i / 4] >> i % 4 * 2 & 3u) << 8;
    with_signs(book<Book::IQ2_S>() + point * 8, p[34 + i], parts.codes + i * 8);
  }
}

void IQ3_XXS::take(const uint8_t* p, Parts& parts) {
  parts.d = read::half(p);
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t all = word(p + 66 + i / 8 * 4), signs = eight_signs(all >> i / 2 % 4 * 7 & 127) >> i % 2 * 4;
    const uint8_t* levels = book<Book::IQ3_XXS>() + p[2 + i] * 4;
    parts.scales[i / 8] = odd(all >> 28);
    for (size_t j = 0; j < 4; ++j) parts.codes[i * 4 + j] = uint8_t(levels[j] | (signs >> j & 1) << 3);
  }
}

void IQ3_S::take(const uint8_t* p, Parts& parts) {
  parts.d = read::half(p);
  odd_nibbles(p + 106, 4, parts);
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t point = p[2 + i] | (p[66 + i / 8] >> i % 8 & 1u) << 8, signs = p[74 + i / 2] >> i % 2 * 4;
    const uint8_t* levels = book<Book::IQ3_S>() + point * 4;
    for (size_t j = 0; j < 4; ++j) parts.codes[i * 4 + j] = uint8_t(signs >> j & 1 ? 7 - levels[j] : 8 + levels[j]);
  }
}

void TQ1_0::take(const uint8_t* p, Parts& parts) {
  ternary(read::half(p + 52), parts);
  uint8_t* codes = digits(p, 32, 5, parts.codes);
  codes = digits(p + 32, 16, 5, codes);
  digits(p + 48, 4, 4, codes);
}

void TQ2_0::take(const uint8_t* p, Parts& parts) {
  ternary(read::half(p + 64), parts);
  read::fields_of_runs(p, 2, 32, 2, parts.codes);
}

void NF4::take(const uint8_t* p, Parts& parts) {
  parts.d = to_half(std::bit_cast<float>(word(p)));
  read::fields(p + 4, 16, 4, parts.codes);
}

}  // namespace penstock
