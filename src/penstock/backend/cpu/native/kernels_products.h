// Products with packed panels, and the functions that all kernels use. The rules of kernels_body.h hold.
#include <utility>

#include "kernels.h"

#if !defined(UNROLLED) || !defined(__OPTIMIZE__)
#define UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE [[gnu::always_inline]] inline  // what it fills must stay in registers

namespace penstock {
namespace {

// ---- functions ----

// e^x for x <= 88: 2^n * e^r with |r| <= ln(2) / 2, and 0 where the result would not be a normal number.
inline F exp(F x) {
  constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
  constexpr float FACTORS[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  const F bounded = max(x, all(-100.0f));
  const F n = round(mul(bounded, all(1.44269504f)));
  const F r = fma(n, all(-LN2_LOW), fma(n, all(-LN2_HIGH), bounded));
  F power = all(1.0f / 5040);
  for (float factor : FACTORS) power = fma(power, r, all(factor));
  return zero_below(times_pow2(power, n), x, -87.0f);
}

// x / (1 + e^-y)
inline F times_sigmoid(F x, F y) { return div(x, add(all(1.0f), exp(min(sub(zero(), y), all(88.0f))))); }

inline F silu(F x) { return times_sigmoid(x, x); }

// x * (1 + tanh(z)) / 2 is x / (1 + e^-2z).
inline F gelu_tanh(F x) {
  constexpr float TWICE_ROOT = 1.5957691216f, CUBE = 0.044715f;  // 2 * sqrt(2 / pi)
  return times_sigmoid(x, mul(mul(all(TWICE_ROOT), x), fma(mul(all(CUBE), x), x, all(1.0f))));
}

inline F relu(F x) { return max(x, zero()); }

inline F relu2(F x) { return mul(relu(x), relu(x)); }

// log(1 + e^x) is max(x, 0) + log(1 + t) for t = e^-|x|, and log(1 + t) is 2 * atanh(s) for s = t / (2 + t), at most a
// third: seven terms of its series are as good as a float.
inline F softplus(F x) {
  constexpr float FACTORS[] = {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f};
  const F t = exp(sub(zero(), abs(x))), s = div(t, add(all(2.0f), t)), square = mul(s, s);
  F series = all(1.0f / 13);
  for (float factor : FACTORS) series = fma(series, square, all(factor));
  return fma(mul(all(2.0f), s), series, max(x, zero()));
}

// x or 0, less |x| times the part of a normal distribution beyond |x|: Abramowitz and Stegun 7.1.26, within 1e-7.
inline F gelu(F x) {
  constexpr float FACTORS[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
  const F size = abs(x), root = mul(size, all(0.70710678119f));
  const F t = div(all(1.0f), fma(root, all(0.3275911f), all(1.0f)));
  F power = all(1.061405429f);
  for (float factor : FACTORS) power = fma(power, t, all(factor));
  const F beyond = mul(mul(mul(power, t), exp(sub(zero(), mul(root, root)))), all(0.5f));
  return sub(relu(x), mul(size, beyond));
}

inline F tanh(F x) {
  const F power = exp(min(add(x, x), all(88.0f)));
  return sub(all(1.0f), div(all(2.0f), add(power, all(1.0f))));
}

inline size_t at_most(size_t value, size_t limit) { return value < limit ? value : limit; }

// ---- products with packed panels ----

template <size_t N>
struct Count {};

template <size_t LEAST, size_t MOST, class With>
inline void with_count(size_t rows, size_t row, With with) {
  if (rows == MOST) return with(Count<MOST>{}, row);
  if constexpr (MOST > LEAST) with_count<LEAST, MOST - 1>(rows, row, with);
}

// Calls with(Count<n>, row) for tiles of LEAST to MOST rows, of nearly equal size.
template <size_t LEAST, size_t MOST, class With>
inline void by_tiles(size_t rows, With with) {
  const size_t tiles = (rows + MOST - 1) / MOST;
  for (size_t i = 0; i < tiles; ++i)
    with_count<LEAST, MOST>(rows * (i + 1) / tiles - rows * i / tiles, rows * i / tiles, with);
}

// One panel's block of 32 as the loops use it: an integer dot product, then one multiply-add for each scale.
template <class Q>
struct Ready {
  Codes codes[8];
  F scale[Q::GROUPS];
  F minimum[Q::MINIMA ? Q::GROUPS : 1];
  F total;  // of scale * number: what a middle of x is multiplied by; set if there are any
};

template <class Q, int GROUP>
INLINE Codes codes_of(const std::byte* block, const int8_t* table) {
  constexpr int HIGH = Q::HIGH ? Q::HIGH : 1;
  Codes codes = field<GROUP / Q::LOW * Q::LOW, Q::LOW>(load_codes(block + GROUP % Q::LOW * 64));
  if constexpr (Q::HIGH)
    codes = join<Q::LOW>(codes, field<GROUP / HIGH * HIGH, HIGH>(load_codes(block + Packed<Q>::HIGH + GROUP % HIGH * 64)));
  if constexpr (Q::TABLED) return centered(lookup(codes, table), 0);
  return Q::MINIMA ? codes : centered(codes, Q::ZERO);
}

template <class Q>
INLINE F factor(const std::byte* head, const std::byte* own, size_t group) {
  if constexpr (Q::SCALE == Scale::HALF_TIMES_BYTE)
    return mul(load((const uint16_t*)head), load((const int8_t*)own + group * LANES));
  const uint16_t* bits = (const uint16_t*)own + group * LANES;
  return Q::SCALE == Scale::HALF ? load(bits) : load_bfloat(bits);
}

template <class Q, int... GROUP>
INLINE void get_codes(const std::byte* block, const int8_t* table, Codes (&codes)[8],
                      std::integer_sequence<int, GROUP...>) {
  ((codes[GROUP] = codes_of<Q, GROUP>(block, table)), ...);
}

template <class Q>
INLINE F total_of(const Ready<Q>& ready) {
  static constexpr int8_t ONES[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};  // ARM reads a whole vector
  const Four ones = spread(ONES, 0);
  F total = zero();
  UNROLL for (size_t h = 0; h < Q::GROUPS; ++h) {
    I numbers = all(Q::MINIMA || SIGNED_BYTES ? 0 : -128 * int(BLOCK / Q::GROUPS));
    UNROLL for (size_t g = h * 8 / Q::GROUPS; g < (h + 1) * 8 / Q::GROUPS; ++g)
      numbers = dot<!Q::MINIMA>(numbers, ready.codes[g], ones);
    total = fma(ready.scale[h], to_float(numbers), total);
  }
  return total;
}

template <class Q>
INLINE void get_ready(const std::byte* panel, size_t b, const int8_t* table, Ready<Q>& ready) {
  using P = Packed<Q>;
  const std::byte* head = panel + P::head(b);
  const std::byte* block = panel + P::at(b);
  get_codes<Q>(block, table, ready.codes, std::make_integer_sequence<int, 8>{});
  UNROLL for (size_t h = 0; h < Q::GROUPS; ++h) {
    ready.scale[h] = factor<Q>(head, block + P::SCALES, h);
    if constexpr (Q::MINIMA) ready.minimum[h] = factor<Q>(head + LANES * 2, block + P::MINIMA, h);
  }
}

// sums[p][i] += block b of row i . that of panel p
template <class Q, size_t P, size_t N>
INLINE void add_block(const Ready<Q>* const (&ready)[P], const CodeBlock* const (&x)[N], size_t b, bool middles,
                      F (&sums)[P][N]) {
  UNROLL for (size_t h = 0; h < Q::GROUPS; ++h) {
    const size_t whole = Q::GROUPS == 1 ? 2 : h;
    I dots[P][N];
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t p = 0; p < P; ++p) dots[p][i] = all(Q::MINIMA || SIGNED_BYTES ? 0 : x[i][b].offset[whole]);
    UNROLL for (size_t g = h * 8 / Q::GROUPS; g < (h + 1) * 8 / Q::GROUPS; ++g)
      UNROLL for (size_t i = 0; i < N; ++i) {
        const Four four = spread(x[i][b].q, g);
        UNROLL for (size_t p = 0; p < P; ++p) dots[p][i] = dot<!Q::MINIMA>(dots[p][i], ready[p]->codes[g], four);
      }
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t p = 0; p < P; ++p) {
        sums[p][i] = fma(to_float(dots[p][i]), mul(ready[p]->scale[h], all(x[i][b].scale)), sums[p][i]);
        if constexpr (Q::MINIMA) sums[p][i] = fma(ready[p]->minimum[h], all(x[i][b].sum[whole]), sums[p][i]);
      }
  }
  if (middles)
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t p = 0; p < P; ++p) sums[p][i] = fma(ready[p]->total, all(x[i][b].middle), sums[p][i]);
}

inline void finish(const PanelProduct& p, size_t panel, size_t row, F sums) {
  const size_t column = panel * LANES, lanes = at_most(p.columns - column, LANES);
  float* y = p.y + row * p.y_stride + column;
  if (p.bias) sums = add(sums, load_some(p.bias + column, lanes));
  if (p.add) sums = add(load_some(y, lanes), sums);
  store_some(y, sums, lanes);
}

// Asks for memory that will be read soon. Panels follow each other, so what follows a block is the next to be read.
inline void fetch(const std::byte* block, size_t bytes) {
  constexpr size_t AHEAD = 4096;
  UNROLL for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + AHEAD + i);
}

// Products with P panels at a time. DEPTH blocks of them and of the rows of a tile fit the first-level cache.
template <class Q, size_t P, size_t DEPTH = 24>
struct Coded {
  const PanelProduct& p;
  size_t panel;
  const std::byte* data[P];

  template <size_t N>
  void rows_from(size_t row, const CodeBlock* (&x)[N]) const {
    UNROLL for (size_t i = 0; i < N; ++i) x[i] = (const CodeBlock*)(p.x + (row + i) * p.x_stride);
  }

  F whole(F sum) const { return Q::TABLED ? mul(sum, all(p.factor)) : sum; }

  template <size_t N>
  void finish_tile(size_t row, const F (&sums)[P][N]) const {
    if (P == 2 && p.partners)
      for (size_t i = 0; i < N; ++i) finish(p, panel, row + i, mul(silu(whole(sums[0][i])), whole(sums[P - 1][i])));
    else
      for (size_t i = 0; i < N; ++i)
        for (size_t j = 0; j < P; ++j) finish(p, panel + j, row + i, whole(sums[j][i]));
  }

  // Few rows: a block is made ready in registers, so that a panel is read once and nothing is written.
  template <size_t N>
  void few(size_t row) const {
    const CodeBlock* x[N];
    F sums[P][N];
    rows_from(row, x);
    UNROLL for (size_t j = 0; j < P; ++j)
      UNROLL for (size_t i = 0; i < N; ++i) sums[j][i] = zero();
    for (size_t b = 0; b < p.width / BLOCK; ++b) {
      Ready<Q> ready[P];
      const Ready<Q>* at[P];
      UNROLL for (size_t j = 0; j < P; ++j) {
        fetch(data[j] + Packed<Q>::at(b), Packed<Q>::BLOCK_BYTES);
        get_ready(data[j], b, p.table, ready[j]);
        ready[j].total = p.middles ? total_of(ready[j]) : zero();
        at[j] = &ready[j];
      }
      add_block(at, x, b, p.middles, sums);
    }
    finish_tile(row, sums);
  }

  void few_rows() const {
    by_tiles<1, MOST_FEW>(p.rows, [&]<size_t N>(Count<N>, size_t row) { few<N>(row); });
  }

  // Many rows: the panels are made ready once for all of them, a span of blocks at a time. Between spans the sums of a
  // row are put aside.
  struct Span {
    size_t first, last;
    Ready<Q> ready[P][DEPTH];
    F aside[BAND][P];
  };

  // While a tile of rows is computed with, its share of the panels that come next is brought near.
  template <size_t N>
  void some(size_t row, Span& span) const {
    constexpr size_t BYTES = Packed<Q>::BLOCK_BYTES;
    const size_t ahead = p.partners ? p.panel_bytes : P * p.panel_bytes;
    const size_t begin = BYTES * row / p.rows, end = BYTES * (row + N) / p.rows;
    const CodeBlock* x[N];
    F sums[P][N];
    rows_from(row, x);
    UNROLL for (size_t j = 0; j < P; ++j)
      UNROLL for (size_t i = 0; i < N; ++i) sums[j][i] = span.first ? span.aside[row + i][j] : zero();
    for (size_t b = span.first; b < span.last; ++b) {
      const Ready<Q>* at[P];
      UNROLL for (size_t j = 0; j < P; ++j) {
        at[j] = &span.ready[j][b - span.first];
        for (size_t i = begin; i < end; i += 64) __builtin_prefetch(data[j] + ahead + Packed<Q>::at(b) + i, 0, 2);
      }
      add_block(at, x, b, p.middles, sums);
    }
    if (span.last == p.width / BLOCK) return finish_tile(row, sums);
    UNROLL for (size_t j = 0; j < P; ++j)
      UNROLL for (size_t i = 0; i < N; ++i) span.aside[row + i][j] = sums[j][i];
  }

  // Calls each(span) with its blocks ready.
  template <class Each>
  void by_spans(Each each) const {
    const size_t blocks = p.width / BLOCK, spans = (blocks + DEPTH - 1) / DEPTH;
    Span span;
    for (size_t s = 0; s < spans; ++s) {
      span.first = blocks * s / spans;
      span.last = blocks * (s + 1) / spans;
      for (size_t j = 0; j < P; ++j)
        for (size_t b = span.first; b < span.last; ++b) {
          Ready<Q>& ready = span.ready[j][b - span.first];
          get_ready(data[j], b, p.table, ready);
          if (p.middles) ready.total = total_of(ready);
        }
      each(span);
    }
  }

  void many_rows() const {
    by_spans([&](Span& span) {
      by_tiles<LEAST_MANY, ROWS>(p.rows, [&]<size_t N>(Count<N>, size_t row) { some<N>(row, span); });
    });
  }
};

template <class Q, size_t... DEPTH>
Coded<Q, 2, DEPTH...> pair_of(const PanelProduct& p, size_t panel) {
  const std::byte* first = p.panels + panel * p.panel_bytes;
  return {p, panel, {first, p.partners ? p.partners + panel * p.panel_bytes : first + p.panel_bytes}};
}

template <class Q>
void coded_product(const PanelProduct& p) {
  const size_t panels = (p.columns + LANES - 1) / LANES, step = p.partners ? 1 : 2;
  size_t panel = 0;
  if (p.rows > MOST_FEW)
    for (; panel + step <= panels; panel += step) pair_of<Q>(p, panel).many_rows();
  else if (p.partners)
    for (; panel < panels; ++panel) pair_of<Q>(p, panel).few_rows();
  for (; panel < panels; ++panel) Coded<Q, 1>{p, panel, {p.panels + panel * p.panel_bytes}}.few_rows();
}

// Two consecutive values of 16 rows.
struct Two {
  F even, odd;
};
template <class T>
struct Apart {
  using Value = T;
  static Two load(const T* p) { return {penstock::load(p), penstock::load(p + 16)}; }
};
struct Bfloats {
  using Value = uint16_t;
  static Two load(const uint16_t* p) { return {even_bfloats(p), odd_bfloats(p)}; }
};

template <class Float>
struct Plain {
  template <size_t N>
  static void rows(const PanelProduct& p, size_t panel, size_t row) {
    const auto* values = (const typename Float::Value*)(p.panels + panel * p.panel_bytes);
    const float* x[N];
    F even[N], odd[N];  // two chains hide the latency of the sum
    UNROLL for (size_t i = 0; i < N; ++i) {
      x[i] = (const float*)(p.x + (row + i) * p.x_stride);
      even[i] = odd[i] = zero();
    }
    size_t k = 0;
    for (; k + 2 <= p.width; k += 2) {
      const Two w = Float::load(values + k * 16);
      UNROLL for (size_t i = 0; i < N; ++i) {
        even[i] = fma(w.even, all(x[i][k]), even[i]);
        odd[i] = fma(w.odd, all(x[i][k + 1]), odd[i]);
      }
    }
    if (k < p.width)
      UNROLL for (size_t i = 0; i < N; ++i) even[i] = fma(Float::load(values + k * 16).even, all(x[i][k]), even[i]);
    UNROLL for (size_t i = 0; i < N; ++i) finish(p, panel, row + i, add(even[i], odd[i]));
  }

  static void product(const PanelProduct& p) {
    for (size_t panel = 0; panel * LANES < p.columns; ++panel) {
      by_tiles<1, PLAIN_ROWS>(p.rows, [&]<size_t N>(Count<N>, size_t row) { rows<N>(p, panel, row); });
    }
  }
};

}  // namespace
}  // namespace penstock
