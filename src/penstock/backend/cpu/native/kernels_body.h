// The kernels, written once over 16 lanes. An ISA includes its lanes_*.h before this file and fills `kernels`.
//
// Only functions without external linkage may be used here: anything the linker could share with another translation
// unit (std::max included) might be the copy compiled for a CPU that this one is not.
//
// The order in which a row's values are added up depends on the shape of the weight alone, never on how many rows
// there are: a row's result is the same in any batch.
#include "kernels.h"

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace penstock {
namespace {

// ---- products with packed panels ----

struct Q4_0 {
  using Code = decltype(load_bytes(nullptr));
  static constexpr size_t BYTES = 256;
  static constexpr bool MINIMA = false;
  static I start(const CodeBlock& x) { return all(x.offset / 16); }  // -8 * sum(q)
  static I dot(I sums, const Code& codes, const int8_t* x) { return dot_nibbles(sums, codes, x); }
  static void load(const std::byte* p, Code* codes) {
    UNROLL for (int g = 0; g < 4; ++g) load_nibbles(p + g * 64, codes[g], codes[g + 4]);
  }
};

struct Q4_1 : Q4_0 {
  static constexpr bool MINIMA = true;
  static I start(const CodeBlock&) { return all(int32_t(0)); }
};

struct Q8_0 {
  using Code = decltype(load_bytes(nullptr));
  static constexpr size_t BYTES = 512;
  static constexpr bool MINIMA = false;
  static I start(const CodeBlock& x) { return all(SIGNED_BYTES ? 0 : x.offset); }
  static I dot(I sums, const Code& codes, const int8_t* x) { return dot_bytes(sums, codes, x); }
  static void load(const std::byte* p, Code* codes) {
    UNROLL for (int g = 0; g < 8; ++g) codes[g] = load_bytes(p + g * 64);
  }
};

inline void finish(const PanelProduct& p, size_t row, F sums) {
  if (p.bias) sums = add(sums, load_some(p.bias, p.lanes));
  store_some(p.y + row * p.y_stride, sums, p.lanes);
}

template <class Quant>
struct Coded {
  template <size_t N>
  static void rows(const PanelProduct& p, size_t row) {
    const size_t blocks = p.width / BLOCK;
    const uint16_t* scales = (const uint16_t*)(p.panel + blocks * Quant::BYTES);
    const uint16_t* minima = scales + blocks * 16;
    const CodeBlock* x[N];
    F sums[N];
    UNROLL for (size_t i = 0; i < N; ++i) {
      x[i] = (const CodeBlock*)(p.x + (row + i) * p.x_stride);
      sums[i] = zero();
    }
    for (size_t b = 0; b < blocks; ++b) {
      typename Quant::Code codes[8];
      Quant::load(p.panel + b * Quant::BYTES, codes);
      const F scale = load(scales + b * 16);
      UNROLL for (size_t i = 0; i < N; ++i) {
        I dot = Quant::start(x[i][b]);
        UNROLL for (int g = 0; g < 8; ++g) dot = Quant::dot(dot, codes[g], x[i][b].q + g * 4);
        sums[i] = fma(to_float(dot), mul(scale, all(x[i][b].scale)), sums[i]);
        if constexpr (Quant::MINIMA) sums[i] = fma(load(minima + b * 16), all(x[i][b].sum), sums[i]);
      }
    }
    UNROLL for (size_t i = 0; i < N; ++i) finish(p, row + i, sums[i]);
  }
};

struct F32 {
  using Value = float;
  static F load(const float* p) { return penstock::load(p); }
};
struct F16 {
  using Value = uint16_t;
  static F load(const uint16_t* p) { return penstock::load(p); }
};
struct BF16 {
  using Value = uint16_t;
  static F load(const uint16_t* p) { return load_bfloat(p); }
};

template <class Float>
struct Plain {
  template <size_t N>
  static void rows(const PanelProduct& p, size_t row) {
    const auto* panel = (const typename Float::Value*)p.panel;
    const float* x[N];
    F even[N], odd[N];  // two chains hide the latency of the sum
    UNROLL for (size_t i = 0; i < N; ++i) {
      x[i] = (const float*)(p.x + (row + i) * p.x_stride);
      even[i] = odd[i] = zero();
    }
    size_t k = 0;
    for (; k + 2 <= p.width; k += 2) {
      const F w0 = Float::load(panel + k * 16), w1 = Float::load(panel + k * 16 + 16);
      UNROLL for (size_t i = 0; i < N; ++i) {
        even[i] = fma(w0, all(x[i][k]), even[i]);
        odd[i] = fma(w1, all(x[i][k + 1]), odd[i]);
      }
    }
    if (k < p.width)
      UNROLL for (size_t i = 0; i < N; ++i) even[i] = fma(Float::load(panel + k * 16), all(x[i][k]), even[i]);
    UNROLL for (size_t i = 0; i < N; ++i) finish(p, row + i, add(even[i], odd[i]));
  }
};

// Fewer than N rows are left.
template <class Body, size_t N>
void last_rows(const PanelProduct& p, size_t row) {
  if constexpr (N > 1) {
    if (p.rows - row == N - 1)
      Body::template rows<N - 1>(p, row);
    else
      last_rows<Body, N - 1>(p, row);
  }
}

template <class Body>
void product(const PanelProduct& p) {
  size_t row = 0;
  for (; row + ROWS <= p.rows; row += ROWS) Body::template rows<ROWS>(p, row);
  last_rows<Body, ROWS>(p, row);
}

// ---- rows ----

void quantize(const float* x, size_t width, CodeBlock* out) {
  for (size_t b = 0; b < width / BLOCK; ++b, x += BLOCK) {
    const F low = load(x), high = load(x + 16);
    const float largest = maximum(max(abs(low), abs(high)));
    const float scale = largest / 127.0f;
    const F inverse = all(largest > 0 ? 127.0f / largest : 0.0f);
    const I low_codes = to_int(mul(low, inverse)), high_codes = to_int(mul(high, inverse));
    const int32_t total = sum(add(low_codes, high_codes));
    store_bytes(out[b].q, low_codes);
    store_bytes(out[b].q + 16, high_codes);
    out[b].scale = scale;
    out[b].sum = scale * float(total);
    out[b].offset = -128 * total;
  }
}

// Calls lane(offset, count) for each run of up to 16 values.
template <class Lane>
void by_lanes(size_t width, Lane lane) {
  for (size_t i = 0; i < width; i += 16) lane(i, width - i < 16 ? width - i : 16);
}

void add_norm(const float* x, const float* residual, const float* gain, float eps, size_t width, float* total,
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

void gate(const float* x, size_t hidden, float* out) {
  by_lanes(hidden, [&](size_t i, size_t n) {
    const F left = load_some(x + i, n), right = load_some(x + hidden + i, n);
    const F silu = div(left, add(all(1.0f), exp(min(sub(zero(), left), all(88.0f)))));
    store_some(out + i, mul(silu, right), n);
  });
}

void scale(float* x, size_t n, float factor) {
  by_lanes(n, [&](size_t i, size_t count) { store_some(x + i, mul(load_some(x + i, count), all(factor)), count); });
}

// ---- sampling ----

float highest(const float* x, size_t n) {
  F most = all(-__builtin_inff());
  size_t i = 0;
  for (; i + 16 <= n; i += 16) most = max(load(x + i), most);
  float found = maximum(most);
  for (; i < n; ++i)
    if (x[i] > found) found = x[i];
  return found;
}

// Products and sums apart, so that no ISA rounds otherwise than another.
void weigh(const float* x, size_t n, float temperature, float highest, float* weights) {
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

void rotate(const float* x, size_t dim, const Rotation& turn, float scale, float* out) {
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

void soften(float* scores, size_t n, float& highest, float& total, size_t padded, float* out) {
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

template <class T>
struct Kv {
  static void store(const float* key, const float* value, size_t dim, size_t padded, size_t lane, void* tile) {
    const F highest = all(sizeof(T) == 2 ? 65504.0f : 3.4e38f), lowest = sub(zero(), highest);
    T* keys = (T*)tile;
    T* values = keys + dim * TILE + lane * padded;
    by_lanes(dim, [&](size_t i, size_t n) {
      T sixteen[16];
      penstock::store(sixteen, min(max(load_some(key + i, n), lowest), highest));
      for (size_t j = 0; j < n; ++j) keys[(i + j) * TILE + lane] = sixteen[j];
      penstock::store(values + i, min(max(load_some(value + i, n), lowest), highest));
    });
  }

  template <size_t N>
  static void score_some(const float* queries, size_t dim, const T* keys, float* scores) {
    F even[N], odd[N];
    UNROLL for (size_t i = 0; i < N; ++i) even[i] = odd[i] = zero();
    for (size_t d = 0; d + 2 <= dim; d += 2) {
      const F k0 = load(keys + d * TILE), k1 = load(keys + (d + 1) * TILE);
      UNROLL for (size_t i = 0; i < N; ++i) {
        even[i] = fma(k0, all(queries[i * dim + d]), even[i]);
        odd[i] = fma(k1, all(queries[i * dim + d + 1]), odd[i]);
      }
    }
    UNROLL for (size_t i = 0; i < N; ++i) penstock::store(scores + i * SPAN, add(even[i], odd[i]));
  }

  static void score(const float* queries, size_t count, size_t dim, const void* keys, float* scores) {
    by_queries<QUERIES>(0, count, [=]<size_t N>(size_t i) {
      score_some<N>(queries + i * dim, dim, (const T*)keys, scores + i * SPAN);
    });
  }

  template <size_t N, size_t D>
  static void mix_some(const float* weights, const T* values, size_t n, size_t padded, float* out) {
    F sums[N][D], value[D];
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t d = 0; d < D; ++d) sums[i][d] = load(out + i * padded + d * 16);
    for (size_t j = 0; j < n; ++j) {
      UNROLL for (size_t d = 0; d < D; ++d) value[d] = load(values + j * padded + d * 16);
      UNROLL for (size_t i = 0; i < N; ++i) {
        const F weight = all(weights[i * SPAN + j]);
        UNROLL for (size_t d = 0; d < D; ++d) sums[i][d] = fma(value[d], weight, sums[i][d]);
      }
    }
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t d = 0; d < D; ++d) penstock::store(out + i * padded + d * 16, sums[i][d]);
  }

  static void mix(const float* weights, size_t count, const void* values, size_t n, size_t padded, float* out) {
    by_queries<MIXED>(0, count, [=]<size_t N>(size_t i) {
      const float* mine = weights + i * SPAN;
      float* to = out + i * padded;
      size_t d = 0;
      for (; d + WIDE * 16 <= padded; d += WIDE * 16) mix_some<N, WIDE>(mine, (const T*)values + d, n, padded, to + d);
      for (; d < padded; d += 16) mix_some<N, 1>(mine, (const T*)values + d, n, padded, to + d);
    });
  }

  static constexpr KvKernels table() { return {store, score, mix}; }
};

constexpr Kernels kernels = {
    {product<Plain<F32>>, product<Plain<F16>>, product<Plain<BF16>>, product<Coded<Q4_0>>, product<Coded<Q4_1>>,
     product<Coded<Q8_0>>},
    quantize,
    add_norm,
    gate,
    rotate,
    soften,
    scale,
    highest,
    weigh,
    Kv<uint16_t>::table(),
    Kv<float>::table(),
};

}  // namespace
}  // namespace penstock
