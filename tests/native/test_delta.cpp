// The delta rule: all tokens at once and one by one give the same bits, which are near the recurrence in doubles.
#include "check.h"

namespace penstock::test {

namespace {

struct Inputs {
  size_t k_dim, v_dim, count;
  bool channels;
  std::vector<float> q = {}, k = {}, faded = {}, v = {}, decay = {}, beta = {};

  size_t decays() const { return channels ? k_dim : 1; }

  // What the kernel is told of `some` tokens from `first` on.
  DeltaRule rule(size_t first, size_t some, float* memory, float* columns, float* out) const {
    return {.q = q.data() + first * k_dim,
            .k = k.data() + first * k_dim,
            .faded = faded.data() + first * k_dim,
            .v = v.data() + first * v_dim,
            .decay = decay.data() + first * decays(),
            .beta = beta.data() + first,
            .channels = channels,
            .k_dim = k_dim,
            .v_dim = v_dim,
            .v_stride = v_dim,
            .count = some,
            .memory = memory,
            .columns = columns,
            .out = out + first * v_dim,
            .out_stride = v_dim};
  }
};

Inputs make_inputs(const Isa& isa, size_t k_dim, size_t v_dim, size_t count, bool channels) {
  Random random(k_dim + v_dim);
  Inputs made = {.k_dim = k_dim, .v_dim = v_dim, .count = count, .channels = channels};
  made.q = random.floats(count * k_dim);
  made.k = random.floats(count * k_dim);
  made.v = random.floats(count * v_dim);
  made.decay = random.floats(count * made.decays());
  made.beta = random.floats(count);
  made.faded.resize(count * k_dim);
  for (float& decay : made.decay) decay = 0.5f + 0.5f * std::fabs(decay);
  for (float& beta : made.beta) beta = std::fabs(beta);
  for (size_t token = 0; token < count; ++token) {
    isa.kernels->delta.unit(&made.k[token * k_dim], k_dim, 1.0f, &made.k[token * k_dim]);
    isa.kernels->delta.fade(&made.k[token * k_dim], &made.decay[token * made.decays()], channels, k_dim,
                            &made.faded[token * k_dim]);
  }
  return made;
}

std::vector<double> recurrence(const Inputs& in, const std::vector<float>& begin) {
  std::vector<double> memory(begin.begin(), begin.end()), out(in.count * in.v_dim);
  for (size_t token = 0; token < in.count; ++token)
    for (size_t c = 0; c < in.v_dim; ++c) {
      const float *q = &in.q[token * in.k_dim], *k = &in.k[token * in.k_dim], *decay = &in.decay[token * in.decays()];
      double known = 0;
      for (size_t j = 0; j < in.k_dim; ++j) known += (memory[j * in.v_dim + c] *= decay[in.channels ? j : 0]) * k[j];
      const double learned = in.beta[token] * (in.v[token * in.v_dim + c] - known);
      for (size_t j = 0; j < in.k_dim; ++j)
        out[token * in.v_dim + c] += (memory[j * in.v_dim + c] += k[j] * learned) * q[j];
    }
  return out;
}

void test_delta_rule(const Isa& isa, size_t k_dim, size_t v_dim, bool channels) {
  const std::string what = isa.name + " delta rule of " + std::to_string(k_dim) + " by " + std::to_string(v_dim) +
                           (channels ? ", by channel" : "");
  const size_t count = 9;
  const Inputs in = make_inputs(isa, k_dim, v_dim, count, channels);
  const auto begin = Random(7).floats(k_dim * v_dim);
  auto at_once = begin, apart = begin;
  std::vector<float> columns(k_dim * MAX_COLUMNS), out(count * v_dim), each(count * v_dim);
  isa.kernels->delta.delta_rule(in.rule(0, count, at_once.data(), columns.data(), out.data()));
  for (size_t token = 0; token < count; ++token)
    isa.kernels->delta.delta_rule(in.rule(token, 1, apart.data(), columns.data(), each.data()));
  check(same_bits(out, each), what + ": tokens apart read the same");
  check(same_bits(at_once, apart), what + ": tokens apart leave the same memory");
  const auto wanted = recurrence(in, begin);
  for (size_t i = 0; i < out.size(); ++i) check(near(out[i], wanted[i], 2e-5), what);
}

}  // namespace

void test_delta(const Isa& isa) {
  for (const bool channels : {false, true}) {
    test_delta_rule(isa, 7, 21, channels);
    test_delta_rule(isa, 32, 80, channels);
  }
}

}  // namespace penstock::test
