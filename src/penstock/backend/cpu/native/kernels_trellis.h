// Products with EXL3 weights, over the lanes of one ISA (see kernels_body.h). trellis.h defines the places of their bits.

namespace penstock {
namespace {

// Vectors as wide as a register: compilers take wider ones apart, one value at a time.
#if defined(__AVX512F__)
constexpr size_t WORDS = 16;
#elif defined(__AVX2__)
constexpr size_t WORDS = 8;
#else
constexpr size_t WORDS = 4;
#endif
using Words = uint32_t __attribute__((vector_size(WORDS * 4)));
using SignedWords = int32_t __attribute__((vector_size(WORDS * 4)));
using HalfWords = uint16_t __attribute__((vector_size(WORDS * 2)));
using Floats = float __attribute__((vector_size(WORDS * 4)));

template <class V, class T>
INLINE V loaded(const T* p) {
  V x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <class V, class T>
INLINE void stored(T* p, V x) {
  __builtin_memcpy(p, &x, sizeof x);
}

// Values of both vectors in another order. GCC has clang's way since version 12, clang has none of GCC's.
template <class Mask, int... AT, class V>
INLINE V shuffled(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, AT...);
#else
  return __builtin_shuffle(a, b, Mask{AT...});
#endif
}

// Two numbers, again and again.
INLINE F alternate(const float* two) {
  using Pairs = uint64_t __attribute__((vector_size(WORDS * 4)));
  struct All {
    Pairs pairs[16 / WORDS];
  } all;
  uint64_t pair;
  __builtin_memcpy(&pair, two, sizeof pair);
  for (Pairs& some : all.pairs) some = Pairs{} + pair;
  return __builtin_bit_cast(F, all);
}

// ---- code books: the numbers of states ----

// The sum of two float16 numbers, of which a product gives the sign, the lowest bits of the exponent and the fraction.
template <uint32_t FACTOR, uint32_t ADDED>
struct SumOfHalves {
  static constexpr uint32_t MASK = 0x81ffe000, FLIPPED = 0x3f6c0000;  // 0x8fff and 0x3b60 of a float16, in a float

  INLINE static Floats upper(Words product) { return (Floats)(((Words)((SignedWords)product >> 3) & MASK) ^ FLIPPED); }
  INLINE static Floats numbers(Words states) {
    const Words product = states * FACTOR + ADDED;
    return upper(product) + upper(product << 16);
  }
};

// The sum of the four bytes of a product.
template <uint32_t FACTOR>
struct SumOfBytes {
  static constexpr float STEP = 0x1.bb8p-8f, MIDDLE = -0x1.4c4p+3f;  // float16 numbers

  INLINE static Floats numbers(Words states) {
    const Words product = states * FACTOR;
    const Words pairs = (product & 0xff00ffu) + ((product >> 8) & 0xff00ffu), sum = (pairs + (pairs >> 16)) & 0xffffu;
    return __builtin_convertvector((SignedWords)sum, Floats) * STEP + (1024 * STEP + MIDDLE);
  }
};

// ---- tiles ----

constexpr size_t TILE_VECTORS = 16;  // 16 numbers each
constexpr auto ALL_VECTORS = std::make_index_sequence<TILE_VECTORS>{};

// One word of 16 lanes.
struct LaneWords {
  HalfWords some[16 / WORDS];

  INLINE static LaneWords at(const uint16_t* p) { return loaded<LaneWords>(p); }
};

// Each lane's last word is the one before the next lane's first.
INLINE LaneWords next_lanes(const uint16_t* p) {
  using Eight = uint16_t __attribute__((vector_size(16)));
  using Sixteen = uint16_t __attribute__((vector_size(32)));
  if constexpr (WORDS == 16) {
    const Sixteen all = loaded<Sixteen>(p);
    return __builtin_bit_cast(LaneWords,
                              shuffled<Sixteen, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14>(all, all));
  }
  struct {
    Eight low, high;
  } next;
  const Eight low = loaded<Eight>(p), high = loaded<Eight>(p + 8);
  next.low = shuffled<Eight, 7, 8, 9, 10, 11, 12, 13, 14>(high, low);
  next.high = shuffled<Eight, 7, 8, 9, 10, 11, 12, 13, 14>(low, high);
  return __builtin_bit_cast(LaneWords, next);
}

// The words of a tile, each behind the one before it in its lane: [bits][16].
INLINE void make_windows(const uint16_t* tile, size_t bits, uint32_t* windows) {
  LaneWords before = next_lanes(tile + (bits - 1) * 16);
  for (size_t i = 0; i < bits; ++i, tile += 16, windows += 16) {
    const LaneWords here = LaneWords::at(tile);
    for (size_t j = 0; j < 16 / WORDS; ++j)
      stored(windows + j * WORDS, __builtin_convertvector(before.some[j], Words) << 16 |
                                      __builtin_convertvector(here.some[j], Words));
    before = here;
  }
}

template <class Book>
INLINE F numbers_of(const uint32_t* window, uint32_t shift) {
  struct All {
    Floats floats[16 / WORDS];
  } all;
  for (size_t i = 0; i < 16 / WORDS; ++i)
    all.floats[i] = Book::numbers((loaded<Words>(window + i * WORDS) >> shift) & 0xffffu);
  return __builtin_bit_cast(F, all);
}

// Calls take(Count<t>, numbers) for each vector t of a tile.
template <class Book, class Take, size_t... T>
INLINE void decode_tile(const uint16_t* tile, const TrellisSteps& steps, std::index_sequence<T...>, Take take) {
  alignas(64) uint32_t windows[TRELLIS_BITS * 16];
  make_windows(tile, steps.bits, windows);
  (take(Count<T>{}, numbers_of<Book>(windows + steps.window[T] * 16, steps.shift[T])), ...);
}

// Vectors t have numbers of the first 8 columns if t / 4 is even, else of the last. They are multiplied by a pair of
// values of x.
constexpr size_t pair_of(size_t t) { return t / 2 % 2 * 8 + t / 8 * 4 + t % 2 * 2; }

struct Sums {
  F half[2];
};

// Sums of neighbouring lanes are of the same column.
INLINE void store_sums(const TrellisProduct& p, size_t panel, size_t row, F first, F second) {
  float lanes[32], *y = p.y + row * p.y_stride + panel * 16;
  store(lanes, first);
  store(lanes + 16, second);
  for (size_t i = 0; i < 16; ++i) y[i] = lanes[2 * i] + lanes[2 * i + 1];
}

// In the order of TrellisRows::one_row, so that a row's result is the same in any batch.
template <size_t N>
void some_rows(const float* x, size_t stride, const F* numbers, size_t tiles, Sums* sums) {
  Sums mine[N];
  UNROLL for (size_t i = 0; i < N; ++i) mine[i] = sums[i];
  for (size_t eight = 0; eight < tiles * 2; ++eight, numbers += 8) {
    const float* pairs = x + eight / 2 * 16 + pair_of(eight % 2 * 8);
    for (size_t t = 0; t < 4; ++t)
      UNROLL for (size_t i = 0; i < N; ++i) {
        const F pair = alternate(pairs + i * stride + pair_of(t));
        mine[i].half[0] = fma(numbers[t], pair, mine[i].half[0]);
        mine[i].half[1] = fma(numbers[t + 4], pair, mine[i].half[1]);
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
    F first = zero(), second = zero();
    for (size_t tile = 0; tile < p.width / 16; ++tile) {
      const float* x = p.x + tile * 16;
      decode_tile<Book>(tile_at(p, panel, tile), *p.steps, ALL_VECTORS,
                        [&]<size_t T>(Count<T>, F numbers) __attribute__((always_inline)) {
                          F& sum = T / 4 % 2 ? second : first;
                          sum = fma(numbers, alternate(x + pair_of(T)), sum);
                        });
    }
    store_sums(p, panel, 0, first, second);
  }

  static void many_rows(const TrellisProduct& p, size_t panel) {
    F numbers[CHUNK * TILE_VECTORS];
    Sums sums[BAND];
    for (size_t row = 0; row < p.rows; ++row) sums[row] = {{zero(), zero()}};
    for (size_t first = 0; first < p.width / 16; first += CHUNK) {
      const size_t tiles = at_most(p.width / 16 - first, CHUNK);
      for (size_t i = 0; i < tiles; ++i)
        decode_tile<Book>(tile_at(p, panel, first + i), *p.steps, ALL_VECTORS,
                          [&]<size_t T>(Count<T>, F some) __attribute__((always_inline)) {
                            numbers[i * TILE_VECTORS + T] = some;
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

// Sums and differences of values that lie STEP lanes apart.
template <int STEP, size_t... I>
INLINE Floats crossed(Floats x, std::index_sequence<I...>) {
  return shuffled<SignedWords, (int(I) ^ STEP)...>(x, x) + x * Floats{(I & size_t(STEP) ? -1.0f : 1.0f)...};
}

INLINE void hadamard(float (&values)[128]) {
  constexpr size_t COUNT = 128 / WORDS;
  constexpr auto LANES_OF_ONE = std::make_index_sequence<WORDS>{};
  Floats x[COUNT];
  for (size_t i = 0; i < COUNT; ++i) {
    x[i] = crossed<2>(crossed<1>(loaded<Floats>(values + i * WORDS), LANES_OF_ONE), LANES_OF_ONE);
    if constexpr (WORDS >= 8) x[i] = crossed<4>(x[i], LANES_OF_ONE);
    if constexpr (WORDS >= 16) x[i] = crossed<8>(x[i], LANES_OF_ONE);
  }
  for (size_t step = 1; step < COUNT; step *= 2)
    for (size_t i = 0; i < COUNT; ++i)
      if (!(i & step)) {
        const Floats a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
  for (size_t i = 0; i < COUNT; ++i) stored(values + i * WORDS, x[i]);
}

constexpr float ROOT = 0x1.6a09e6p-4f;  // 1 / sqrt(128)

// Values that lie 4 apart become the pairs that `alternate` reads.
inline void rotate_inputs(const float* x, const float* factors, size_t width, float* out) {
  for (; width; width -= 128, x += 128, factors += 128, out += 128) {
    float some[128];
    for (size_t i = 0; i < 128; ++i) some[i] = x[i] * factors[i] * ROOT;
    hadamard(some);
    for (size_t i = 0; i < 128; i += 8)
      for (size_t j = 0; j < 4; ++j) {
        out[i + 2 * j] = some[i + j];
        out[i + 2 * j + 1] = some[i + j + 4];
      }
  }
}

inline void rotate_outputs(const float* factors, const float* bias, size_t width, float* y) {
  for (size_t at = 0; at < width; at += 128) {
    float some[128];
    __builtin_memcpy(some, y + at, sizeof some);
    hadamard(some);
    for (size_t i = 0; i < 128; ++i) y[at + i] = some[i] * (factors[at + i] * ROOT) + (bias ? bias[at + i] : 0.0f);
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
