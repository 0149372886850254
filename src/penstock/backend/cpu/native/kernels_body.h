// The kernels, written once over 16 lanes. An ISA includes its lanes_*.h before this file and asks for their table.
//
// Only functions without external linkage may be used here: anything the linker could share with another translation
// unit (std::max included) might be the copy compiled for a CPU that this one is not.
//
// The order in which a row's values are added up depends on the shape of the weight alone, never on how many rows
// there are: a row's result is the same in any batch.
#include "kernels_products.h"

namespace penstock {
namespace {

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

// What it norms lies in `out` meanwhile: a run that is not full is read back with zeros after it, which count nothing.
inline void add_layer_norm(const float* x, const float* residual, const float* gain, const float* bias, float eps,
                           size_t width, float* total, float* out) {
  F values = zero(), squares = zero();
  by_lanes(width, [&](size_t i, size_t n) {
    F value = load_some(x + i, n);
    if (residual) {
      value = add(value, load_some(residual + i, n));
      store_some(total + i, value, n);
    }
    values = add(values, value);
  });
  const F mean = all(sum(values) / float(width));
  const float* from = residual ? total : x;
  by_lanes(width, [&](size_t i, size_t n) {
    store_some(out + i, sub(load_some(from + i, n), mean), n);
    const F value = load_some(out + i, n);
    squares = fma(value, value, squares);
  });
  const F scale = all(1.0f / __builtin_sqrtf(sum(squares) / float(width) + eps));
  by_lanes(width, [&](size_t i, size_t n) {
    const F normed = mul(load_some(out + i, n), scale);
    store_some(out + i, fma(normed, load_some(gain + i, n), load_some(bias + i, n)), n);
  });
}

template <F (*ACT)(F)>
void activate(const float* x, size_t n, float* out) {
  by_lanes(n, [&](size_t i, size_t count) { store_some(out + i, ACT(load_some(x + i, count)), count); });
}

template <F (*ACT)(F)>
inline F gated(F left, F right) {
  return mul(ACT(left), right);
}

inline F clamped(F left, F right) {
  const F low = min(left, all(7.0f));
  return mul(times_sigmoid(low, mul(all(1.702f), low)), add(all(1.0f), max(min(right, all(7.0f)), all(-7.0f))));
}

template <F (*GATE)(F, F)>
void gate(const float* x, size_t hidden, float* out) {
  by_lanes(hidden, [&](size_t i, size_t n) {
    store_some(out + i, GATE(load_some(x + i, n), load_some(x + hidden + i, n)), n);
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
  static void store_key(const float* key, size_t dim, size_t lane, void* tile) {
    const Narrow<T> narrow(key, dim, tile, lane);
    T* keys = Tile<T>::keys(tile);
    by_lanes(dim, [&](size_t i, size_t n) {
      T sixteen[16];
      narrow(load_some(key + i, n), sixteen);
      for (size_t j = 0; j < n; ++j) keys[(i + j) * TILE + lane] = sixteen[j];
    });
  }

  static void store(const float* key, const float* value, size_t dim, size_t padded, size_t lane, void* tile) {
    store_key(key, dim, lane, tile);
    const Narrow<T> narrow(value, dim, tile, TILE + lane);
    T* values = Tile<T>::keys(tile) + dim * TILE + lane * padded;
    by_lanes(dim, [&](size_t i, size_t n) { narrow(load_some(value + i, n), values + i); });
  }

  template <size_t N>
  static void score_some(const float* queries, size_t dim, const void* tile, const void* soon, float* scores) {
    const T *keys = Tile<T>::keys(tile), *next = Tile<T>::keys(soon);  // which values follow
    F even[N], odd[N];
    UNROLL for (size_t i = 0; i < N; ++i) even[i] = odd[i] = zero();
    for (size_t d = 0; d + 2 <= dim; d += 2) {
      __builtin_prefetch(next + d * TILE, 0, 2);
      __builtin_prefetch(next + (dim + d) * TILE, 0, 2);
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
  static void mix_some(const float* weights, const void* tile, const T* values, size_t stride, size_t n, size_t padded,
                       float* out) {
    F sums[N][D], value[D];
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t d = 0; d < D; ++d) sums[i][d] = load(out + i * padded + d * 16);
    for (size_t j = 0; j < n; ++j) {
      UNROLL for (size_t d = 0; d < D; ++d) value[d] = load(values + j * stride + d * 16);
      UNROLL for (size_t i = 0; i < N; ++i) {
        const F share = all(weight(weights[i * SPAN + j], tile, j));
        UNROLL for (size_t d = 0; d < D; ++d) sums[i][d] = fma(value[d], share, sums[i][d]);
      }
    }
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t d = 0; d < D; ++d) penstock::store(out + i * padded + d * 16, sums[i][d]);
  }

  static void mix(const float* weights, size_t count, const void* tile, size_t n, size_t dim, size_t padded, float* out) {
    mix_rows(weights, count, tile, Tile<T>::keys(tile) + dim * TILE, padded, n, padded, out);
  }

  // Of values that are `stride` apart.
  static void mix_rows(const float* weights, size_t count, const void* tile, const T* values, size_t stride, size_t n,
                       size_t padded, float* out) {
    by_queries<MIXED>(0, count, [=]<size_t N>(size_t i) {
      const float* mine = weights + i * SPAN;
      float* to = out + i * padded;
      size_t d = 0;
      for (; d + WIDE * 16 <= padded; d += WIDE * 16)
        mix_some<N, WIDE>(mine, tile, values + d, stride, n, padded, to + d);
      for (; d < padded; d += 16) mix_some<N, 1>(mine, tile, values + d, stride, n, padded, to + d);
    });
  }

  static constexpr KvKernels table() { return {store, score, mix, store_key}; }
};

}  // namespace
}  // namespace penstock

#include "kernels_mla.h"
#include "kernels_delta.h"
#include "kernels_mamba.h"
#include "kernels_mamba2.h"
#include "kernels_streams.h"
#include "kernels_trellis.h"

namespace penstock {
namespace {

template <class... Q>
constexpr Kernels table(Types<Q...>) {
  return {
      {Plain<Apart<float>>::product, Plain<Apart<uint16_t>>::product, Plain<Bfloats>::product,
       coded_product<typename Q::Kind>...},
      nullptr,
      quantize,
      add_norm,
      gate<gated<silu>>,
      gate<gated<gelu>>,
      gate<gated<gelu_tanh>>,
      gate<clamped>,
      rotate,
      soften,
      scale,
      soft_cap,
      highest,
      weigh,
      Kv<uint16_t>::table(),
      Kv<float>::table(),
      Kv<int8_t>::table(),
      add_layer_norm,
      activate<silu>,
      activate<gelu>,
      activate<gelu_tanh>,
      activate<relu>,
      MlaKv<uint16_t>::table(),
      MlaKv<float>::table(),
      MlaKv<int8_t>::table(),
      Delta::table(),
      Mamba::table(),
      Mamba2::table(),
      activate<relu2>,
      index_scores,
      Streams::table(),
      trellis_table(),
  };
}

}  // namespace
}  // namespace penstock
