// What kernels compute of 16 values at once: exponentials and activations. The rules of kernels_body.h hold.
#pragma once

namespace penstock {
namespace {

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

}  // namespace
}  // namespace penstock
