// What is computed of one row: quantization, norm, gate, rotation, and the weights that sampling draws from.
#include <algorithm>
#include <limits>

#include "check.h"

namespace penstock::test {

namespace {

constexpr float NAN_ = std::numeric_limits<float>::quiet_NaN(), INFINITE = std::numeric_limits<float>::infinity();

void test_quantize(const Isa& isa, bool middles) {
  Random random(1);
  auto x = random.floats(5 * BLOCK);
  std::fill_n(x.begin() + BLOCK, BLOCK, 0.0f);
  for (size_t j = 0; j < BLOCK; ++j) {
    x[2 * BLOCK + j] = float(j) - 14.5f;  // halves, with 127 among them: ties go to the even
    x[3 * BLOCK + j] *= 1e-30f;
  }
  x[2 * BLOCK] = -127;
  std::vector<CodeBlock> blocks(5);
  isa.kernels->quantize(x.data(), x.size(), middles, blocks.data());
  for (size_t b = 0; b < 5; ++b) {
    const auto first = x.begin() + ptrdiff_t(b * BLOCK);
    const auto [least, most] = std::minmax_element(first, first + BLOCK);
    const float middle = middles ? (*least + *most) * 0.5f : 0.0f;
    for (size_t j = 0; j < BLOCK; ++j) x[b * BLOCK + j] -= middle;
    float largest = 0;
    for (size_t j = 0; j < BLOCK; ++j) largest = std::max(largest, std::fabs(x[b * BLOCK + j]));
    const float scale = largest / 127.0f, inverse = largest > 0 ? 127.0f / largest : 0.0f;
    int32_t sums[3] = {};
    bool right = blocks[b].scale == scale && blocks[b].middle == middle;
    for (size_t j = 0; j < BLOCK; ++j) {
      const int32_t code = int32_t(std::nearbyint(x[b * BLOCK + j] * inverse));
      right &= blocks[b].q[j] == code;
      sums[j / 16] += code;
      sums[2] += code;
    }
    for (int i = 0; i < 3; ++i) {
      right &= blocks[b].sum[i] == scale * float(sums[i]) + middle * (i < 2 ? 16.0f : 32.0f);
      right &= blocks[b].offset[i] == -128 * sums[i];
    }
    check(right, isa.name + " quantize, block " + std::to_string(b) + (middles ? ", with a middle" : ""));
  }
}

void test_norm(const Isa& isa, size_t width, bool added) {
  const std::string what = isa.name + " norm of " + std::to_string(width) + (added ? " and a residual" : "");
  Random random(width);
  const auto x = random.floats(width, 3), residual = random.floats(width), gain = random.floats(width);
  std::vector<float> total(width), out(width);
  isa.kernels->add_norm(x.data(), added ? residual.data() : nullptr, gain.data(), 1e-5f, width, total.data(),
                        out.data());
  double squares = 0;
  for (size_t i = 0; i < width; ++i) {
    if (added) check(total[i] == x[i] + residual[i], what + ": sum");
    const double value = added ? total[i] : x[i];
    squares += value * value;
  }
  const double scale = 1 / std::sqrt(squares / double(width) + 1e-5);
  for (size_t i = 0; i < width; ++i) {
    const double want = double(added ? total[i] : x[i]) * scale * gain[i];
    check(near(out[i], want, 1e-6 * std::fabs(want)), what);
  }
}

void test_layer_norm(const Isa& isa, size_t width, bool added) {
  const std::string what = isa.name + " layer norm of " + std::to_string(width) + (added ? " and a residual" : "");
  Random random(width);
  auto x = random.floats(width, 3);
  for (float& value : x) value += 20;
  const auto residual = random.floats(width), gain = random.floats(width), bias = random.floats(width);
  std::vector<float> total(width), out(width);
  isa.kernels->add_layer_norm(x.data(), added ? residual.data() : nullptr, gain.data(), bias.data(), 1e-5f, width,
                              total.data(), out.data());
  if (!added) total = x;
  double mean = 0, variance = 0;
  for (size_t i = 0; i < width; ++i) {
    if (added) check(total[i] == x[i] + residual[i], what + ": sum");
    mean += total[i] / double(width);
  }
  for (float value : total) variance += (value - mean) * (value - mean) / double(width);
  for (size_t i = 0; i < width; ++i) {
    const double want = (total[i] - mean) / std::sqrt(variance + 1e-5) * gain[i] + bias[i];
    check(near(out[i], want, 1e-5), what);
  }
}

void test_activations(const Isa& isa, size_t n) {
  Random random(n);
  auto x = random.floats(n, 6);
  x[0] = -95;
  x[n - 1] = 300;
  std::vector<float> out(n);
  const auto compare = [&](Activation activation, const char* name, auto meaning) {
    activation(x.data(), n, out.data());
    for (size_t i = 0; i < n; ++i) {
      const double want = meaning(double(x[i])), allowed = 1e-6 * std::fabs(want) + 1e-6;
      check(near(out[i], want, allowed), isa.name + " " + name + " of " + std::to_string(n));
    }
  };
  compare(isa.kernels->silu, "silu", [](double v) { return v / (1 + std::exp(-v)); });
  compare(isa.kernels->gelu, "gelu", [](double v) { return v * std::erfc(-v / std::sqrt(2.0)) / 2; });
  compare(isa.kernels->relu, "relu", [](double v) { return std::max(v, 0.0); });
  compare(isa.kernels->gelu_tanh, "tanh's gelu", [](double v) {
    return v / (1 + std::exp(-2 * std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v)));
  });
}

void test_gate(const Isa& isa, size_t hidden) {
  Random random(hidden);
  auto x = random.floats(2 * hidden, 20);
  x[0] = -95;
  x[hidden - 1] = 300;
  std::vector<float> out(hidden);
  isa.kernels->gate(x.data(), hidden, out.data());
  for (size_t i = 0; i < hidden; ++i) {
    const double want = x[i] / (1 + std::exp(-double(x[i]))) * x[hidden + i];
    check(near(out[i], want, 2e-6 * std::fabs(want) + 1e-34), isa.name + " gate of " + std::to_string(hidden));
  }
  isa.kernels->gelu_gate(x.data(), hidden, out.data());
  for (size_t i = 0; i < hidden; ++i) {
    const double want = x[i] * std::erfc(-double(x[i]) / std::sqrt(2.0)) / 2 * x[hidden + i];
    const double allowed = 1e-6 * std::fabs(want) + 1e-6 * std::fabs(x[hidden + i]);
    check(near(out[i], want, allowed), isa.name + " gelu gate of " + std::to_string(hidden));
  }
  isa.kernels->gelu_tanh_gate(x.data(), hidden, out.data());
  for (size_t i = 0; i < hidden; ++i) {
    const double left = x[i], z = std::sqrt(2 / std::acos(-1.0)) * (left + 0.044715 * left * left * left);
    const double want = left / (1 + std::exp(-2 * z)) * x[hidden + i];
    const double allowed = 1e-5 * std::fabs(want) + 1e-30;  // exp makes its argument's error one of its result
    check(near(out[i], want, allowed), isa.name + " tanh's gelu gate of " + std::to_string(hidden));
  }
  isa.kernels->clamped_gate(x.data(), hidden, out.data());
  for (size_t i = 0; i < hidden; ++i) {
    const double left = std::min(double(x[i]), 7.0), right = std::clamp(double(x[hidden + i]), -7.0, 7.0);
    const double want = left / (1 + std::exp(-1.702 * left)) * (1 + right);
    check(near(out[i], want, 1e-5 * std::fabs(want) + 1e-30), isa.name + " clamped gate of " + std::to_string(hidden));
  }
}

void test_soft_cap(const Isa& isa, size_t n) {
  Random random(n);
  auto x = random.floats(n, 20);
  x[n / 2] = 5000;
  auto capped = x;
  isa.kernels->soft_cap(capped.data(), n, 30);
  for (size_t i = 0; i < n; ++i)
    check(near(capped[i], 30 * std::tanh(x[i] / 30.0), 1e-5), isa.name + " soft cap of " + std::to_string(n));
}

void test_rotate(const Isa& isa, size_t dim, size_t pairs, bool interleaved) {
  Random random(dim + pairs);
  const auto x = random.floats(dim), cos = random.floats(pairs), sin = random.floats(pairs);
  std::vector<float> out(dim), plain(dim);
  const Rotation turn = {cos.data(), sin.data(), pairs, interleaved};
  isa.kernels->rotate(x.data(), dim, turn, 0.3f, out.data());
  generic().rotate(x.data(), dim, turn, 0.3f, plain.data());
  check(same_bits(out, plain), isa.name + " rotate as in plain C++");
  for (size_t i = 0; i < pairs; ++i) {
    const size_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + pairs;
    check(near(out[a], (double(x[a]) * cos[i] - double(x[b]) * sin[i]) * 0.3f, 1e-7), isa.name + " rotate");
    check(near(out[b], (double(x[b]) * cos[i] + double(x[a]) * sin[i]) * 0.3f, 1e-7), isa.name + " rotate");
  }
  for (size_t i = 2 * pairs; i < dim; ++i) check(out[i] == x[i] * 0.3f, isa.name + " rotate: what stays");
}

void test_sampling(const Isa& isa, size_t n) {
  const std::string what = " of " + std::to_string(n);
  Random random(n);
  auto x = random.floats(n, 30);
  for (size_t i = 5; i < n; i += 11) x[i] = i % 2 ? NAN_ : -INFINITE;
  if (n > 21) x[21] = 31;  // in the lane of a NaN
  float most = -INFINITE;
  for (float value : x) most = value > most ? value : most;
  check(isa.kernels->highest(x.data(), n) == most, isa.name + " highest" + what);
  for (float temperature : {0.4f, 1.0f, 1.7f}) {
    std::vector<float> weights(n), plain(n);
    isa.kernels->weigh(x.data(), n, temperature, most, weights.data());
    generic().weigh(x.data(), n, temperature, most, plain.data());
    check(same_bits(weights, plain), isa.name + " weights as in plain C++" + what);
    for (size_t i = 0; i < n; ++i) {
      const double power = (double(x[i]) - most) / temperature;
      const double want = power >= -87 ? std::exp(power) : 0;
      check(near(weights[i], want, 1e-5 * want + 1e-37), isa.name + " weights" + what);
    }
  }
}

void test_scale(const Isa& isa, size_t n) {
  Random random(n);
  const auto x = random.floats(n);
  auto scaled = x;
  isa.kernels->scale(scaled.data(), n, 0.7f);
  for (size_t i = 0; i < n; ++i) check(scaled[i] == x[i] * 0.7f, isa.name + " scale");
}

}  // namespace

void test_rows(const Isa& isa) {
  for (bool middles : {false, true}) test_quantize(isa, middles);
  for (size_t width : {1, 16, 47, 576})
    for (bool added : {false, true}) {
      test_norm(isa, width, added);
      test_layer_norm(isa, width, added);
    }
  for (size_t n : {1, 16, 45}) test_activations(isa, n);
  for (size_t hidden : {5, 16, 40}) test_gate(isa, hidden);
  for (bool interleaved : {false, true}) {
    test_rotate(isa, 64, 32, interleaved);
    test_rotate(isa, 20, 7, interleaved);
  }
  for (size_t n : {1, 15, 16, 17, 300}) {
    test_sampling(isa, n);
    test_scale(isa, n);
    test_soft_cap(isa, n);
  }
}

}  // namespace penstock::test
