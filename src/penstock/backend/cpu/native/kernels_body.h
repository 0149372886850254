// The kernels, written once over 16 lanes. An ISA includes its lanes_*.h before this file and asks for their table.
//
// Only functions without external linkage may be used here: anything the linker could share with another translation
// unit (std::max included) might be the copy compiled for a CPU that this one is not.
//
// The order in which a row's values are added up depends on the shape of the weight alone, never on how many rows
// there are: a row's result is the same in any batch.
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
inline F gelu(F x) {
  constexpr float TWICE_ROOT = 1.5957691216f, CUBE = 0.044715f;  // 2 * sqrt(2 / pi)
  return times_sigmoid(x, mul(mul(all(TWICE_ROOT), x), fma(mul(all(CUBE), x), x, all(1.0f))));
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
INLINE Codes codes_of(const std::byte* block) {
  constexpr int HIGH = Q::HIGH ? Q::HIGH : 1;
  Codes codes = field<GROUP / Q::LOW * Q::LOW, Q::LOW>(load_codes(block + GROUP % Q::LOW * 64));
  if constexpr (Q::HIGH)
    codes = join<Q::LOW>(codes, field<GROUP / HIGH * HIGH, HIGH>(load_codes(block + Packed<Q>::HIGH + GROUP % HIGH * 64)));
  if constexpr (requires { Q::TABLE; }) return centered(lookup(codes, Q::TABLE), 0);
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
INLINE void get_codes(const std::byte* block, Codes (&codes)[8], std::integer_sequence<int, GROUP...>) {
  ((codes[GROUP] = codes_of<Q, GROUP>(block)), ...);
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
INLINE void get_ready(const std::byte* panel, size_t b, Ready<Q>& ready) {
  using P = Packed<Q>;
  const std::byte* head = panel + P::head(b);
  const std::byte* block = panel + P::at(b);
  get_codes<Q>(block, ready.codes, std::make_integer_sequence<int, 8>{});
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
  if (p.bias) sums = add(sums, load_some(p.bias + column, lanes));
  store_some(p.y + row * p.y_stride + column, sums, lanes);
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

  template <size_t N>
  void finish_tile(size_t row, const F (&sums)[P][N]) const {
    if (P == 2 && p.partners)
      for (size_t i = 0; i < N; ++i) finish(p, panel, row + i, mul(silu(sums[0][i]), sums[P - 1][i]));
    else
      for (size_t i = 0; i < N; ++i)
        for (size_t j = 0; j < P; ++j) finish(p, panel + j, row + i, sums[j][i]);
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
        get_ready(data[j], b, ready[j]);
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
          get_ready(data[j], b, ready);
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

// ---- rows ----

inline void quantize(const float* x, size_t width, bool middles, CodeBlock* out) {
  for (size_t b = 0; b < width / BLOCK; ++b, x += BLOCK) {
    F low = load(x), high = load(x + 16);
    float middle = 0;
    if (middles) {
      middle = (maximum(max(low, high)) - maximum(sub(zero(), min(low, high)))) * 0.5f;
      low = sub(low, all(middle));
      high = sub(high, all(middle));
    }
    const float largest = maximum(max(abs(low), abs(high)));
    const float scale = largest / 127.0f;
    const F inverse = all(largest > 0 ? 127.0f / largest : 0.0f);
    const I low_codes = to_int(mul(low, inverse)), high_codes = to_int(mul(high, inverse));
    const int32_t first = sum(low_codes), second = sum(high_codes), totals[3] = {first, second, first + second};
    store_bytes(out[b].q, low_codes);
    store_bytes(out[b].q + 16, high_codes);
    out[b].scale = scale;
    out[b].middle = middle;
    for (int i = 0; i < 3; ++i) {
      out[b].sum[i] = scale * float(totals[i]) + middle * float(i == 2 ? 32 : 16);
      out[b].offset[i] = -128 * totals[i];
    }
  }
}

// Calls lane(offset, count) for each run of up to 16 values.
template <class Lane>
void by_lanes(size_t width, Lane lane) {
  for (size_t i = 0; i < width; i += 16) lane(i, width - i < 16 ? width - i : 16);
}

inline void add_norm(const float* x, const float* residual, const float* gain, float eps, size_t width, float* total,
              float* out) {
  F squares = zero();
  by_lanes(width, [&](size_t i, size_t n) {
    F value = load_some(x + i, n);
    if (residual) {
      value = add(value, load_some(residual + i, n));
      store_some(total + i, value, n);
    }
    squares = fma(value, value, squares);
  });
  const F scale = all(1.0f / __builtin_sqrtf(sum(squares) / float(width) + eps));
  const float* from = residual ? total : x;
  by_lanes(width, [&](size_t i, size_t n) {
    store_some(out + i, mul(mul(load_some(from + i, n), scale), load_some(gain + i, n)), n);
  });
}

template <F (*ACT)(F)>
void gate(const float* x, size_t hidden, float* out) {
  by_lanes(hidden, [&](size_t i, size_t n) {
    const F left = load_some(x + i, n), right = load_some(x + hidden + i, n);
    store_some(out + i, mul(ACT(left), right), n);
  });
}

inline void scale(float* x, size_t n, float factor) {
  by_lanes(n, [&](size_t i, size_t count) { store_some(x + i, mul(load_some(x + i, count), all(factor)), count); });
}

// ---- sampling ----

inline float highest(const float* x, size_t n) {
  F most = all(-__builtin_inff());
  size_t i = 0;
  for (; i + 16 <= n; i += 16) most = max(load(x + i), most);
  float found = maximum(most);
  for (; i < n; ++i)
    if (x[i] > found) found = x[i];
  return found;
}

inline void soft_cap(float* x, size_t n, float cap) {
  by_lanes(n, [&](size_t i, size_t count) {
    store_some(x + i, mul(all(cap), tanh(div(load_some(x + i, count), all(cap)))), count);
  });
}

// Products and sums apart, so that no ISA rounds otherwise than another.
inline void weigh(const float* x, size_t n, float temperature, float highest, float* weights) {
  constexpr float FACTORS[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  const F most = all(highest / temperature);
  by_lanes(n, [&](size_t i, size_t count) {
    const F below = sub(div(load_some(x + i, count), all(temperature)), most);
    const F bounded = max(below, all(-100.0f));
    const F power_of_two = round(mul(bounded, all(1.44269504f)));
    const F r = sub(sub(bounded, mul(power_of_two, all(0.693359375f))), mul(power_of_two, all(-2.12194440e-4f)));
    F power = all(1.0f / 5040);
    for (float factor : FACTORS) power = add(mul(power, r), all(factor));
    store_some(weights + i, zero_below(times_pow2(power, power_of_two), below, -87.0f), count);
  });
}

// ---- attention ----

inline void rotate(const float* x, size_t dim, const Rotation& turn, float scale, float* out) {
  const size_t pairs = turn.pairs;
  if (turn.interleaved) {
    for (size_t i = 0; i < pairs; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      out[2 * i] = (a * turn.cos[i] - b * turn.sin[i]) * scale;
      out[2 * i + 1] = (b * turn.cos[i] + a * turn.sin[i]) * scale;
    }
  } else {
    for (size_t i = 0; i < pairs; ++i) {
      const float a = x[i], b = x[i + pairs];
      out[i] = (a * turn.cos[i] - b * turn.sin[i]) * scale;
      out[i + pairs] = (b * turn.cos[i] + a * turn.sin[i]) * scale;
    }
  }
  for (size_t i = 2 * pairs; i < dim; ++i) out[i] = x[i] * scale;
}

inline void soften(float* scores, size_t n, float& highest, float& total, size_t padded, float* out) {
  F most = all(highest);
  for (size_t i = 0; i < n; i += 16) most = max(most, load(scores + i));
  const float before = highest;
  highest = maximum(most);
  F added = zero();
  for (size_t i = 0; i < n; i += 16) {
    const F weight = exp(sub(load(scores + i), all(highest)));
    store(scores + i, weight);
    added = add(added, weight);
  }
  float shrunk[16];
  store(shrunk, exp(all(before - highest)));
  total = total * shrunk[0] + sum(added);
  if (before != highest) scale(out, padded, shrunk[0]);
}

// Calls some<N>(i) for queries i to i + N, with N as large as may be: a query's sums are the same with any N.
template <size_t N, class Some>
void by_queries(size_t i, size_t count, Some some) {
  for (; i + N <= count; i += N) some.template operator()<N>(i);
  if constexpr (N > 1) by_queries<N - 1>(i, count, some);
}

// Where the parts of a tile lie, and what its values are multiples of.
template <class T>
struct Tile {
  static constexpr bool SCALED = sizeof(T) == 1;
  static constexpr size_t SCALES = SCALED ? KV_SCALES * sizeof(float) : 0;

  static T* keys(void* tile) { return (T*)((std::byte*)tile + SCALES); }
  static const T* keys(const void* tile) { return (const T*)((const std::byte*)tile + SCALES); }
  static float& scale(void* tile, size_t which) { return ((float*)tile)[which]; }
  static const float* scales(const void* tile) { return (const float*)tile; }
};

// A vector's values as they are stored, 16 at a time.
template <class T>
struct Narrow {
  F highest = all(sizeof(T) == 2 ? 65504.0f : 3.4e38f), lowest = sub(zero(), highest);

  Narrow(const float*, size_t, void*, size_t) {}
  void operator()(F x, T* out) const { store(out, min(max(x, lowest), highest)); }
};

template <>
struct Narrow<int8_t> {
  F inverse;

  Narrow(const float* x, size_t dim, void* tile, size_t which) {
    F most = zero();
    by_lanes(dim, [&](size_t i, size_t n) { most = max(most, min(abs(load_some(x + i, n)), all(3.4e38f))); });
    const float largest = maximum(most);
    Tile<int8_t>::scale(tile, which) = largest / 127.0f;
    inverse = all(largest > 0 ? 127.0f / largest : 0.0f);
  }
  void operator()(F x, int8_t* out) const {
    store_bytes(out, to_int(min(max(mul(x, inverse), all(-127.0f)), all(127.0f))));
  }
};

template <class T>
struct Kv {
  static void store(const float* key, const float* value, size_t dim, size_t padded, size_t lane, void* tile) {
    const Narrow<T> narrow_key(key, dim, tile, lane), narrow_value(value, dim, tile, TILE + lane);
    T* keys = Tile<T>::keys(tile);
    T* values = keys + dim * TILE + lane * padded;
    by_lanes(dim, [&](size_t i, size_t n) {
      T sixteen[16];
      narrow_key(load_some(key + i, n), sixteen);
      for (size_t j = 0; j < n; ++j) keys[(i + j) * TILE + lane] = sixteen[j];
      narrow_value(load_some(value + i, n), values + i);
    });
  }

  template <size_t N>
  static void score_some(const float* queries, size_t dim, const void* tile, const void* soon, float* scores) {
    const T *keys = Tile<T>::keys(tile), *next = Tile<T>::keys(soon);
    F even[N], odd[N];
    UNROLL for (size_t i = 0; i < N; ++i) even[i] = odd[i] = zero();
    for (size_t d = 0; d + 2 <= dim; d += 2) {
      __builtin_prefetch(next + d * TILE);
      const F k0 = load(keys + d * TILE), k1 = load(keys + (d + 1) * TILE);
      UNROLL for (size_t i = 0; i < N; ++i) {
        even[i] = fma(k0, all(queries[i * dim + d]), even[i]);
        odd[i] = fma(k1, all(queries[i * dim + d + 1]), odd[i]);
      }
    }
    UNROLL for (size_t i = 0; i < N; ++i) {
      F score = add(even[i], odd[i]);
      if constexpr (Tile<T>::SCALED) score = mul(score, load(Tile<T>::scales(tile)));
      penstock::store(scores + i * SPAN, score);
    }
  }

  static void score(const float* queries, size_t count, size_t dim, const void* tile, const void* soon, float* scores) {
    by_queries<QUERIES>(0, count, [=]<size_t N>(size_t i) {
      score_some<N>(queries + i * dim, dim, tile, soon, scores + i * SPAN);
    });
  }

  static float weight(float weight, const void* tile, size_t j) {
    return Tile<T>::SCALED ? weight * Tile<T>::scales(tile)[TILE + j] : weight;
  }

  template <size_t N, size_t D>
  static void mix_some(const float* weights, const void* tile, const T* values, size_t n, size_t padded, float* out) {
    F sums[N][D], value[D];
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t d = 0; d < D; ++d) sums[i][d] = load(out + i * padded + d * 16);
    for (size_t j = 0; j < n; ++j) {
      UNROLL for (size_t d = 0; d < D; ++d) value[d] = load(values + j * padded + d * 16);
      UNROLL for (size_t i = 0; i < N; ++i) {
        const F share = all(weight(weights[i * SPAN + j], tile, j));
        UNROLL for (size_t d = 0; d < D; ++d) sums[i][d] = fma(value[d], share, sums[i][d]);
      }
    }
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t d = 0; d < D; ++d) penstock::store(out + i * padded + d * 16, sums[i][d]);
  }

  static void mix(const float* weights, size_t count, const void* tile, size_t n, size_t dim, size_t padded, float* out) {
    const T* values = Tile<T>::keys(tile) + dim * TILE;
    by_queries<MIXED>(0, count, [=]<size_t N>(size_t i) {
      const float* mine = weights + i * SPAN;
      float* to = out + i * padded;
      size_t d = 0;
      for (; d + WIDE * 16 <= padded; d += WIDE * 16) mix_some<N, WIDE>(mine, tile, values + d, n, padded, to + d);
      for (; d < padded; d += 16) mix_some<N, 1>(mine, tile, values + d, n, padded, to + d);
    });
  }

  static constexpr KvKernels table() { return {store, score, mix}; }
};

template <class... Q>
constexpr Kernels table(Types<Q...>) {
  return {
      {Plain<Apart<float>>::product, Plain<Apart<uint16_t>>::product, Plain<Bfloats>::product, coded_product<Q>...},
      nullptr,
      quantize,
      add_norm,
      gate<silu>,
      gate<gelu>,
      rotate,
      soften,
      scale,
      soft_cap,
      highest,
      weigh,
      Kv<uint16_t>::table(),
      Kv<float>::table(),
      Kv<int8_t>::table(),
  };
}

}  // namespace
}  // namespace penstock
