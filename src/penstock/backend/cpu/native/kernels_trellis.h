// Products with EXL3 weights, over the lanes of one ISA (see kernels_body.h). trellis.h says where their bits lie.

namespace penstock {
namespace {

using Words = uint32_t __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(64)));

inline F lanes_of(Words x) { return __builtin_bit_cast(F, x); }
inline F lanes_of(Floats x) { return __builtin_bit_cast(F, x); }
inline Floats floats_of(F x) { return __builtin_bit_cast(Floats, x); }

inline Floats load_floats(const float* p) {
  Floats x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline void store_floats(float* p, Floats x) { __builtin_memcpy(p, &x, sizeof x); }

// Two numbers, again and again.
INLINE F alternate(const float* two) {
  using Pairs = uint64_t __attribute__((vector_size(64)));
  uint64_t pair;
  __builtin_memcpy(&pair, two, sizeof pair);
  return __builtin_bit_cast(F, Pairs{} + pair);
}

// ---- code books: the numbers of 16 states ----

// The sum of two float16 numbers, of which a product gives the sign, the lowest bits of the exponent and the fraction.
template <uint32_t FACTOR, uint32_t ADDED>
struct SumOfHalves {
  using Signed = int32_t __attribute__((vector_size(64)));
  static constexpr uint32_t MASK = 0x81ffe000, FLIPPED = 0x3f6c0000;  // 0x8fff and 0x3b60 of a float16, as a float has them

  INLINE static F upper(Words product) { return lanes_of(((Words)((Signed)product >> 3) & MASK) ^ FLIPPED); }
  INLINE static F numbers(Words states) {
    const Words product = states * FACTOR + ADDED;
    return add(upper(product), upper(product << 16));
  }
};

// The sum of the four bytes of a product.
template <uint32_t FACTOR>
struct SumOfBytes {
  static constexpr float STEP = 0x1.bb8p-8f, MIDDLE = -0x1.4c4p+3f;  // float16 numbers

  INLINE static F numbers(Words states) {
    const Words product = states * FACTOR;
    const Words pairs = (product & 0xff00ff) + ((product >> 8) & 0xff00ff), sum = (pairs + (pairs >> 16)) & 0xffff;
    return fma(lanes_of(__builtin_convertvector(sum, Floats)), all(STEP), all(1024 * STEP + MIDDLE));
  }
};

// ---- tiles ----

constexpr size_t TILE_VECTORS = 16;  // of 16 numbers each

// Calls take(t, numbers) for each vector t of a tile.
template <class Book, class Take>
INLINE void decode_tile(const uint16_t* tile, const TrellisSteps& steps, Take take) {
  Words windows[TRELLIS_BITS];
  const size_t bits = steps.bits;
  const auto widened = [&](size_t i) {
    using Halves = uint16_t __attribute__((vector_size(32)));
    Halves halves;
    __builtin_memcpy(&halves, tile + i * 16, sizeof halves);
    return __builtin_convertvector(halves, Words);
  };
  Words before = widened(bits - 1);
  before = __builtin_shufflevector(before, before, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14);
  for (size_t i = 0; i < bits; ++i) {
    const Words here = widened(i);
    windows[i] = before << 16 | here;
    before = here;
  }
  UNROLL for (size_t t = 0; t < TILE_VECTORS; ++t)
    take(t, Book::numbers((windows[steps.window[t]] >> steps.shift[t]) & 0xffff));
}

// Columns 8 * half to 8 * half + 8 of a vector's numbers, and the place of its pair of values of x.
constexpr size_t half_of(size_t t) { return t / 4 % 2; }
constexpr size_t pair_of(size_t t) { return (t / 8 * 4 + t % 4) * 2; }

// Sums of the even and of the odd lanes are those of the same column.
INLINE void store_sums(const TrellisProduct& p, size_t panel, size_t row, F first, F second) {
  const Floats a = floats_of(first), b = floats_of(second);
  const Floats even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Floats odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  store_floats(p.y + row * p.y_stride + panel * 16, even + odd);
}

struct Sums {
  F half[2];
};

// In the order of TrellisRows::one_row, so that a row's result is the same in any batch.
template <size_t N>
void some_rows(const float* x, size_t stride, const F* numbers, size_t tiles, Sums* sums) {
  Sums mine[N];
  UNROLL for (size_t i = 0; i < N; ++i) mine[i] = sums[i];
  for (size_t four = 0; four < tiles * 2; ++four) {  // of a tile's halves, each of four vectors for both columns
    const F* vectors = numbers + four * 8;
    for (size_t t = 0; t < 4; ++t)
      UNROLL for (size_t i = 0; i < N; ++i) {
        const F pair = alternate(x + i * stride + four * 8 + t * 2);
        mine[i].half[0] = fma(vectors[t], pair, mine[i].half[0]);
        mine[i].half[1] = fma(vectors[t + 4], pair, mine[i].half[1]);
      }
  }
  UNROLL for (size_t i = 0; i < N; ++i) sums[i] = mine[i];
}

inline void add_products(const TrellisProduct& p, const F* numbers, size_t first, size_t tiles, Sums* sums) {
  by_tiles<PLAIN_ROWS>(p.rows, [&]<size_t N>(Count<N>, size_t row) {
    some_rows<N>(p.x + row * p.x_stride + first * 16, p.x_stride, numbers, tiles, sums + row);
  });
}

template <class Book>
struct TrellisRows {
  static constexpr size_t CHUNK = 16;  // tiles decoded before they are multiplied: they stay in the first cache

  static const uint16_t* tile_at(const TrellisProduct& p, size_t panel, size_t tile) {
    return (const uint16_t*)(p.panels + panel * p.panel_bytes) + tile * 16 * p.steps->bits;
  }

  static void one_row(const TrellisProduct& p, size_t panel) {
    F sums[2] = {zero(), zero()};
    for (size_t tile = 0; tile < p.width / 16; ++tile) {
      const float* x = p.x + tile * 16;
      decode_tile<Book>(tile_at(p, panel, tile), *p.steps, [&](size_t t, F numbers) __attribute__((always_inline)) {
        sums[half_of(t)] = fma(numbers, alternate(x + pair_of(t)), sums[half_of(t)]);
      });
    }
    store_sums(p, panel, 0, sums[0], sums[1]);
  }

  static void many_rows(const TrellisProduct& p, size_t panel) {
    F numbers[CHUNK * TILE_VECTORS];
    Sums sums[BAND];
    for (size_t row = 0; row < p.rows; ++row) sums[row] = {{zero(), zero()}};
    for (size_t first = 0; first < p.width / 16; first += CHUNK) {
      const size_t tiles = at_most(p.width / 16 - first, CHUNK);
      for (size_t i = 0; i < tiles; ++i)
        decode_tile<Book>(tile_at(p, panel, first + i), *p.steps, [&](size_t t, F some) __attribute__((always_inline)) {
          numbers[i * TILE_VECTORS + t] = some;
        });
      add_products(p, numbers, first, tiles, sums);
    }
    for (size_t row = 0; row < p.rows; ++row) store_sums(p, panel, row, sums[row].half[0], sums[row].half[1]);
  }

  static void product(const TrellisProduct& p) {
    for (size_t panel = 0; panel < p.count; ++panel) p.rows == 1 ? one_row(p, panel) : many_rows(p, panel);
  }
};

// ---- Hadamard matrices of 128 values ----

template <int... AT>
INLINE Floats sums_and_differences(Floats x, Floats signs) {
  return __builtin_shufflevector(x, x, AT...) + x * signs;
}

INLINE void hadamard(Floats (&x)[8]) {
  for (size_t step = 1; step < 8; step *= 2)
    for (size_t i = 0; i < 8; ++i)
      if (!(i & step)) {
        const Floats a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
  for (Floats& one : x) {
    one = sums_and_differences<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(
        one, Floats{1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1});
    one = sums_and_differences<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(
        one, Floats{1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1});
    one = sums_and_differences<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(
        one, Floats{1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1});
    one = sums_and_differences<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(
        one, Floats{1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1});
  }
}

constexpr float ROOT = 0x1.6a09e6p-4f;  // 1 / sqrt(128)

// The pairs of values that `alternate` reads lie 4 apart in a tile's inputs.
inline void rotate_inputs(const float* x, const float* factors, size_t width, float* out) {
  for (size_t at = 0; at < width; at += 128) {
    Floats some[8];
    for (size_t i = 0; i < 8; ++i)
      some[i] = load_floats(x + at + i * 16) * load_floats(factors + at + i * 16) * ROOT;
    hadamard(some);
    for (size_t i = 0; i < 8; ++i)
      store_floats(out + at + i * 16, __builtin_shufflevector(some[i], some[i], 0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7,
                                                              10, 14, 11, 15));
  }
}

inline void rotate_outputs(const float* factors, const float* bias, size_t width, float* y) {
  for (size_t at = 0; at < width; at += 128) {
    Floats some[8];
    for (size_t i = 0; i < 8; ++i) some[i] = load_floats(y + at + i * 16);
    hadamard(some);
    for (size_t i = 0; i < 8; ++i) {
      const Floats made = some[i] * (load_floats(factors + at + i * 16) * ROOT);
      store_floats(y + at + i * 16, bias ? made + load_floats(bias + at + i * 16) : made);
    }
  }
}

constexpr TrellisKernels trellis_table() {
  return {{TrellisRows<SumOfHalves<89226354, 64248484>>::product, TrellisRows<SumOfHalves<0xcbac1fed, 0>>::product,
           TrellisRows<SumOfBytes<0x83dcd12d>>::product},
          rotate_inputs,
          rotate_outputs};
}

}  // namespace
}  // namespace penstock
