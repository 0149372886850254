// How values are stored: weights as they lie in a checkpoint and packed, activations as the integer kernels read them.
//
// A quantized weight is made of blocks of 32 values of a row. A format says, in one struct, what a storage block of a
// checkpoint holds and how its parts combine; packing and every kernel follow from it.
//   value = scale * number + minimum, where
//   number = code - ZERO, or TABLE[code] times a FACTOR for all of them; a code has LOW + HIGH bits
//   scale = d, d * its own byte, or its own byte as a float; minimum = 0, m, m * its own byte, or m * scale; GROUPS of
//   each in a block
// What kernels must know of a format is its Kind. Formats of one kind share them: a table is data, and so is a Grouping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock {

inline constexpr size_t BLOCK = 32;
inline constexpr size_t LANES = 16;  // rows of a panel

// 32 activations: scale * q[j] + middle. Sums: first half, second half, all.
struct alignas(64) CodeBlock {
  float scale;
  float middle;
  float sum[3];       // activations, which multiply a minimum of the weights
  int32_t offset[3];  // -128 * sum(q): undoes weights stored 128 too high
  int8_t q[32];
};
static_assert(sizeof(CodeBlock) == 64);

// The parts of a storage block. Unused ones are zero.
struct Parts {
  uint16_t d, m;
  int8_t scales[16], minima[16];
  uint8_t codes[256];
};

namespace read {

inline uint16_t half(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

// Fields of `bits` bits of n bytes: all the lowest, then all the next ones; added to the codes `shift` bits up.
inline void fields(const uint8_t* p, size_t n, int bits, uint8_t* codes, int shift = 0) {
  for (int from = 0; from < 8; from += bits, codes += n)
    for (size_t j = 0; j < n; ++j) codes[j] |= uint8_t((p[j] >> from & ((1 << bits) - 1)) << shift);
}

inline void fields_of_runs(const uint8_t* p, size_t runs, size_t n, int bits, uint8_t* codes, int shift = 0) {
  for (size_t i = 0; i < runs; ++i) fields(p + i * n, n, bits, codes + i * n * 8 / size_t(bits), shift);
}

// 8 scales and 8 minima of 6 bits: four of each in bytes 0-3 and 4-7, the others in the nibbles of bytes 8-11 and the
// top bits of the first eight.
inline void six_bit_pairs(const uint8_t* p, Parts& parts) {
  for (int i = 0; i < 4; ++i) {
    parts.scales[i] = int8_t(p[i] & 63);
    parts.minima[i] = int8_t(p[i + 4] & 63);
    parts.scales[i + 4] = int8_t((p[i + 8] & 15) | p[i] >> 6 << 4);
    parts.minima[i + 4] = int8_t(p[i + 8] >> 4 | p[i + 4] >> 6 << 4);
  }
}

inline uint16_t negative(uint16_t half) { return half ^ 0x8000; }

}  // namespace read

enum class Scale : uint8_t { HALF, E4M3, E8M0, HALF_TIMES_BYTE, GROUPED };

// What kernels of GROUPED scales learn when they run.
struct Grouping {
  uint8_t shift = 0;   // 2^shift blocks of 32 share d and m
  bool zeros = false;  // m is a zero point with its sign changed, which the scale multiplies

  constexpr size_t blocks() const { return size_t(1) << shift; }
};

template <size_t VALUES_, int LOW_, int HIGH_, bool MINIMA_, int ZERO_, Scale SCALE_, size_t GROUPS_, bool TABLED_>
struct KindOf {
  using Kind = KindOf;
  static constexpr size_t VALUES = VALUES_, GROUPS = GROUPS_;  // per storage block, per 32 values
  static constexpr int LOW = LOW_, HIGH = HIGH_, ZERO = ZERO_;
  static constexpr bool MINIMA = MINIMA_, TABLED = TABLED_;
  static constexpr Scale SCALE = SCALE_;
};

template <size_t VALUES, size_t BYTES_, int LOW, int HIGH, bool MINIMA, int ZERO, Scale SCALE, size_t GROUPS = 1>
struct Quantized : KindOf<VALUES, LOW, HIGH, MINIMA, ZERO, SCALE, GROUPS, false> {
  static constexpr size_t BYTES = BYTES_;  // per storage block
  static constexpr const int8_t* TABLE = nullptr;
  static constexpr float FACTOR = 1;
  static constexpr Grouping GROUPING = {};
};

template <size_t VALUES, size_t BYTES_, int LOW, int HIGH, Scale SCALE, const int8_t* TABLE_, size_t GROUPS = 1>
struct Tabled : KindOf<VALUES, LOW, HIGH, false, 0, SCALE, GROUPS, true> {
  static constexpr size_t BYTES = BYTES_;
  static constexpr const int8_t* TABLE = TABLE_;  // 16 numbers
  static constexpr float FACTOR = 1;
  static constexpr Grouping GROUPING = {};
};

// Codes from 0 on, with a scale and a minimum or a zero point for 32 or 64 of them.
template <int BITS, size_t VALUES_, bool ZEROS>
struct Affine : KindOf<BLOCK, (BITS == 8 ? 8 : 4), BITS % 8 % 4, true, 0, Scale::GROUPED, 1, false> {
  static constexpr size_t VALUES = VALUES_, BYTES = 4 + VALUES * BITS / 8;
  static constexpr const int8_t* TABLE = nullptr;
  static constexpr float FACTOR = 1;
  static constexpr Grouping GROUPING = {VALUES / BLOCK / 2, ZEROS};
  static_assert(GROUPING.blocks() * BLOCK == VALUES);

  static void take(const uint8_t* p, Parts& parts) {
    constexpr int LOW = Affine::LOW, HIGH = Affine::HIGH;
    parts.d = read::half(p);
    parts.m = ZEROS ? read::negative(read::half(p + 2)) : read::half(p + 2);
    read::fields(p + 4, VALUES * LOW / 8, LOW, parts.codes);
    if constexpr (HIGH) read::fields(p + 4 + VALUES * LOW / 8, VALUES * HIGH / 8, HIGH, parts.codes, LOW);
  }
};

struct Q4_0 : Quantized<32, 18, 4, 0, false, 8, Scale::HALF> {
  static constexpr const char* NAME = "Q4_0";
  static void take(const uint8_t* p, Parts& parts) {
    parts.d = read::half(p);
    read::fields(p + 2, 16, 4, parts.codes);
  }
};

struct Q4_1 : Quantized<32, 20, 4, 0, true, 0, Scale::HALF> {
  static constexpr const char* NAME = "Q4_1";
  static void take(const uint8_t* p, Parts& parts) {
    parts.d = read::half(p);
    parts.m = read::half(p + 2);
    read::fields(p + 4, 16, 4, parts.codes);
  }
};

struct Q5_0 : Quantized<32, 22, 4, 1, false, 16, Scale::HALF> {
  static constexpr const char* NAME = "Q5_0";
  static void take(const uint8_t* p, Parts& parts) {
    parts.d = read::half(p);
    read::fields_of_runs(p + 2, 4, 1, 1, parts.codes, 4);
    read::fields(p + 6, 16, 4, parts.codes);
  }
};

struct Q5_1 : Quantized<32, 24, 4, 1, true, 0, Scale::HALF> {
  static constexpr const char* NAME = "Q5_1";
  static void take(const uint8_t* p, Parts& parts) {
    parts.d = read::half(p);
    parts.m = read::half(p + 2);
    read::fields_of_runs(p + 4, 4, 1, 1, parts.codes, 4);
    read::fields(p + 8, 16, 4, parts.codes);
  }
};

struct Q8_0 : Quantized<32, 34, 8, 0, false, 0, Scale::HALF> {
  static constexpr const char* NAME = "Q8_0";
  static void take(const uint8_t* p, Parts& parts) {
    parts.d = read::half(p);
    std::memcpy(parts.codes, p + 2, 32);
  }
};

struct Q2_K : Quantized<256, 84, 2, 0, true, 0, Scale::HALF_TIMES_BYTE, 2> {
  static constexpr const char* NAME = "Q2_K";
  static void take(const uint8_t* p, Parts& parts) {
    for (int i = 0; i < 16; ++i) {
      parts.scales[i] = int8_t(p[i] & 15);
      parts.minima[i] = int8_t(p[i] >> 4);
    }
    read::fields_of_runs(p + 16, 2, 32, 2, parts.codes);
    parts.d = read::half(p + 80);
    parts.m = read::negative(read::half(p + 82));
  }
};

struct Q3_K : Quantized<256, 110, 2, 1, false, 4, Scale::HALF_TIMES_BYTE, 2> {
  static constexpr const char* NAME = "Q3_K";
  static void take(const uint8_t* p, Parts& parts) {
    uint8_t scales[16] = {};
    read::fields(p, 32, 1, parts.codes, 2);
    read::fields_of_runs(p + 32, 2, 32, 2, parts.codes);
    read::fields(p + 96, 8, 4, scales);
    read::fields(p + 104, 4, 2, scales, 4);
    for (int i = 0; i < 16; ++i) parts.scales[i] = int8_t(scales[i] - 32);
    parts.d = read::half(p + 108);
  }
};

struct Q4_K : Quantized<256, 144, 4, 0, true, 0, Scale::HALF_TIMES_BYTE> {
  static constexpr const char* NAME = "Q4_K";
  static void take(const uint8_t* p, Parts& parts) {
    parts.d = read::half(p);
    parts.m = read::negative(read::half(p + 2));
    read::six_bit_pairs(p + 4, parts);
    read::fields_of_runs(p + 16, 4, 32, 4, parts.codes);
  }
};

struct Q5_K : Quantized<256, 176, 4, 1, true, 0, Scale::HALF_TIMES_BYTE> {
  static constexpr const char* NAME = "Q5_K";
  static void take(const uint8_t* p, Parts& parts) {
    parts.d = read::half(p);
    parts.m = read::negative(read::half(p + 2));
    read::six_bit_pairs(p + 4, parts);
    read::fields(p + 16, 32, 1, parts.codes, 4);
    read::fields_of_runs(p + 48, 4, 32, 4, parts.codes);
  }
};

struct Q6_K : Quantized<256, 210, 4, 2, false, 32, Scale::HALF_TIMES_BYTE, 2> {
  static constexpr const char* NAME = "Q6_K";
  static void take(const uint8_t* p, Parts& parts) {
    read::fields_of_runs(p, 2, 64, 4, parts.codes);
    read::fields_of_runs(p + 128, 2, 32, 2, parts.codes, 4);
    std::memcpy(parts.scales, p + 192, 16);
    parts.d = read::half(p + 208);
  }
};

inline constexpr int8_t IQ4_TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr int8_t FP4_TABLE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
inline constexpr int8_t IQ3_TABLE[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
inline constexpr int8_t ODD_TABLE[16] = {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15};
inline constexpr int8_t IQ2_TABLE[16] = {8, 25, 43, 0, -8, -25, -43};
inline constexpr int8_t NF4_TABLE[16] = {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127};
inline constexpr int8_t IQ1_TABLE[16] = {-7, 1, 9, 0, -9, -1, 7};  // eightfold -1, 0 and 1, each one higher or lower

struct IQ4_NL : Tabled<32, 18, 4, 0, Scale::HALF, IQ4_TABLE> {
  static constexpr const char* NAME = "IQ4_NL";
  static void take(const uint8_t* p, Parts& parts) { Q4_0::take(p, parts); }
};

struct IQ4_XS : Tabled<256, 136, 4, 0, Scale::HALF_TIMES_BYTE, IQ4_TABLE> {
  static constexpr const char* NAME = "IQ4_XS";
  static void take(const uint8_t* p, Parts& parts) {
    uint8_t scales[8] = {};
    read::fields_of_runs(p + 4, 4, 1, 4, scales);
    read::fields_of_runs(p + 2, 2, 1, 2, scales, 4);
    for (int i = 0; i < 8; ++i) parts.scales[i] = int8_t(scales[i] - 32);
    parts.d = read::half(p);
    read::fields_of_runs(p + 8, 8, 16, 4, parts.codes);
  }
};

struct MXFP4 : Tabled<32, 17, 4, 0, Scale::E8M0, FP4_TABLE> {
  static constexpr const char* NAME = "MXFP4";
  static constexpr float FACTOR = 0.5f;
  static void take(const uint8_t* p, Parts& parts) {
    parts.scales[0] = int8_t(p[0]);
    read::fields(p + 1, 16, 4, parts.codes);
  }
};

// A scale for every 16 values. Kernels read its 256th (see half.h), and the table is doubled.
struct NVFP4 : Tabled<64, 36, 4, 0, Scale::E4M3, FP4_TABLE, 2> {
  static constexpr const char* NAME = "NVFP4";
  static constexpr float FACTOR = 128;
  static void take(const uint8_t* p, Parts& parts) {
    for (size_t i = 0; i < 4; ++i) {
      parts.scales[i] = int8_t(p[i] == 0x7F ? 0 : p[i] & 0x7F);
      read::fields(p + 4 + i * 8, 8, 4, parts.codes + i * 16);
    }
  }
};

// A float32 scale for 32 values, and 16 numbers that are no whole ones: both are rounded, scales to 16 bits and numbers to
// 127ths of the largest.
struct NF4 : Tabled<32, 20, 4, 0, Scale::HALF, NF4_TABLE> {
  static constexpr const char* NAME = "NF4";
  static constexpr float FACTOR = 1.0f / 127;
  static void take(const uint8_t* p, Parts& parts);
};

// Formats whose values, several at a time, are points of a code book (iquants.cpp).
struct IQ1_S : Tabled<256, 50, 2, 1, Scale::HALF_TIMES_BYTE, IQ1_TABLE> {
  static constexpr const char* NAME = "IQ1_S";
  static constexpr float FACTOR = 0.125f;
  static void take(const uint8_t* p, Parts& parts);
};

struct IQ1_M : Tabled<256, 56, 2, 1, Scale::HALF_TIMES_BYTE, IQ1_TABLE, 2> {
  static constexpr const char* NAME = "IQ1_M";
  static constexpr float FACTOR = 0.125f;
  static void take(const uint8_t* p, Parts& parts);
};

struct IQ2_XXS : Tabled<256, 66, 2, 1, Scale::HALF_TIMES_BYTE, IQ2_TABLE> {
  static constexpr const char* NAME = "IQ2_XXS";
  static constexpr float FACTOR = 0.125f;
  static void take(const uint8_t* p, Parts& parts);
};

struct IQ2_XS : Tabled<256, 74, 2, 1, Scale::HALF_TIMES_BYTE, IQ2_TABLE, 2> {
  static constexpr const char* NAME = "IQ2_XS";
  static constexpr float FACTOR = 0.125f;
  static void take(const uint8_t* p, Parts& parts);
};

struct IQ2_S : Tabled<256, 82, 2, 1, Scale::HALF_TIMES_BYTE, IQ2_TABLE, 2> {
  static constexpr const char* NAME = "IQ2_S";
  static constexpr float FACTOR = 0.125f;
  static void take(const uint8_t* p, Parts& parts);
};

struct IQ3_XXS : Tabled<256, 98, 4, 0, Scale::HALF_TIMES_BYTE, IQ3_TABLE> {
  static constexpr const char* NAME = "IQ3_XXS";
  static constexpr float FACTOR = 0.25f;
  static void take(const uint8_t* p, Parts& parts);
};

struct IQ3_S : Tabled<256, 110, 4, 0, Scale::HALF_TIMES_BYTE, ODD_TABLE> {
  static constexpr const char* NAME = "IQ3_S";
  static void take(const uint8_t* p, Parts& parts);
};

// -d, 0 and d are 0, d and 2 * d with a minimum of -d: of the kind of Q2_K.
struct TQ1_0 : Quantized<256, 54, 2, 0, true, 0, Scale::HALF_TIMES_BYTE, 2> {
  static constexpr const char* NAME = "TQ1_0";
  static void take(const uint8_t* p, Parts& parts);
};

struct TQ2_0 : Quantized<256, 66, 2, 0, true, 0, Scale::HALF_TIMES_BYTE, 2> {
  static constexpr const char* NAME = "TQ2_0";
  static void take(const uint8_t* p, Parts& parts);
};

struct U4_MIN_64 : Affine<4, 64, false> {
  static constexpr const char* NAME = "U4_MIN_64";
};
struct U6_MIN_64 : Affine<6, 64, false> {
  static constexpr const char* NAME = "U6_MIN_64";
};
struct U8_MIN_64 : Affine<8, 64, false> {
  static constexpr const char* NAME = "U8_MIN_64";
};
struct U6_MIN_32 : Affine<6, 32, false> {
  static constexpr const char* NAME = "U6_MIN_32";
};
struct U8_MIN_32 : Affine<8, 32, false> {
  static constexpr const char* NAME = "U8_MIN_32";
};
struct U4_ZERO_64 : Affine<4, 64, true> {
  static constexpr const char* NAME = "U4_ZERO_64";
};
struct U4_ZERO_32 : Affine<4, 32, true> {
  static constexpr const char* NAME = "U4_ZERO_32";
};
struct U8_ZERO_64 : Affine<8, 64, true> {
  static constexpr const char* NAME = "U8_ZERO_64";
};
struct U8_ZERO_32 : Affine<8, 32, true> {
  static constexpr const char* NAME = "U8_ZERO_32";
};

// ---- what there is ----

template <class... T>
struct Types {
  static constexpr size_t COUNT = sizeof...(T);
};
using QuantizedFormats =
    Types<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
          NVFP4, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, TQ1_0, TQ2_0,
          NF4, U4_MIN_64, U6_MIN_64, U8_MIN_64, U6_MIN_32, U8_MIN_32, U4_ZERO_64, U4_ZERO_32, U8_ZERO_64, U8_ZERO_32>;

enum class Format : uint8_t { F32, F16, BF16, QUANTIZED };  // those from QUANTIZED on follow the list above
inline constexpr size_t FORMATS = size_t(Format::QUANTIZED) + QuantizedFormats::COUNT;

// ---- where packed values lie ----

// A panel is a run of storage blocks of 16 rows. Each is a head (d, m [16] where bytes scale them) and blocks of 32:
// the codes' low bits, their high bits, the scales [GROUPS][16], the minima [GROUPS][16]. Codes come in groups of 4
// consecutive values of a row, which an 8-bit dot product instruction takes per lane. `bits` bits of the 8 groups fill
// `bits` vectors [16][4 bytes]: group g lies in vector g % bits, g / bits * bits bits up. GROUPED blocks have codes
// alone, and their head (d, m [16]) follows the last block that shares it. SMALL scales [GROUPS][16], floats of 8 bits,
// are a block's head, too. As many heads as fill a vector come before their blocks, so that codes begin where cache
// lines do.
template <class Q>
struct Packed {
  static constexpr bool GROUPED = Q::SCALE == Scale::GROUPED;
  static constexpr bool SMALL = Q::SCALE == Scale::E4M3 || Q::SCALE == Scale::E8M0;
  static constexpr size_t VECTOR = LANES * 4;
  static constexpr size_t BLOCKS = Q::VALUES / BLOCK;
  static constexpr size_t SCALE = GROUPED || SMALL ? 0 : Q::SCALE == Scale::HALF_TIMES_BYTE ? 1 : 2;  // bytes
  static constexpr size_t HIGH = size_t(Q::LOW) * VECTOR;
  static constexpr size_t SCALES = HIGH + size_t(Q::HIGH) * VECTOR;
  static constexpr size_t MINIMA = SCALES + Q::GROUPS * LANES * SCALE;
  static constexpr size_t BLOCK_BYTES = MINIMA + (Q::MINIMA ? Q::GROUPS * LANES * SCALE : 0);
  static constexpr size_t HEAD = SMALL ? Q::GROUPS * LANES : SCALE == 2 ? 0 : LANES * 2 * (Q::MINIMA ? 2 : 1);
  static constexpr size_t BYTES = BLOCKS * BLOCK_BYTES + (SMALL ? BLOCKS : 1) * HEAD;
  static constexpr size_t ALIGNMENT = SMALL ? VECTOR : 1;        // panels
  static constexpr size_t RUN = SMALL ? VECTOR / HEAD : BLOCKS;  // blocks after a head, or after a vector of heads
  static constexpr size_t HEADS = SMALL ? VECTOR : HEAD;         // bytes before them

  static constexpr size_t head(size_t block, Grouping grouping) {
    const size_t group = block >> grouping.shift;
    if (GROUPED) return ((group + 1) << grouping.shift) * BLOCK_BYTES + group * HEAD;
    return block / RUN * (HEADS + RUN * BLOCK_BYTES) + (SMALL ? block % RUN * HEAD : 0);
  }
  static constexpr size_t at(size_t block, Grouping grouping) {
    if (GROUPED) return block * BLOCK_BYTES + (block >> grouping.shift) * HEAD;
    return block / RUN * (HEADS + RUN * BLOCK_BYTES) + HEADS + block % RUN * BLOCK_BYTES;
  }
};

}  // namespace penstock
