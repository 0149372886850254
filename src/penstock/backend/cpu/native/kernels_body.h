// The kernels, written once over 16 lanes. An ISA includes its lanes_*.h before this file and asks for their table.
//
// Only functions without external linkage may be used here: anything the linker could share with another translation
// unit (std::max included) might be the copy compiled for a CPU that this one is not.
//
// The order in which a row's values are added up depends only on the shape of the weight, never on how many rows
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

}  // namespace
}  // namespace penstock

#include "kernels_kv.h"
#include "kernels_kv4.h"
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
      Kv4::table(),
      hadamard,
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
