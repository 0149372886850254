// The inner loops of delta nets, over the lanes of one ISA (see kernels_body.h).

namespace penstock {
namespace {

struct Delta {
  static void convolve(const Convolution& c) {
    by_lanes(c.width, [&](size_t i, size_t n) {
      F total = c.bias ? load_some(c.bias + i, n) : zero();
      for (size_t tap = 0; tap < c.conv_width; ++tap)
        if (c.seen[tap]) total = fma(load_some(c.seen[tap] + i, n), load_some(c.taps + tap * c.width + i, n), total);
      store_some(c.out + i, c.silu ? silu(total) : total, n);
    });
  }

  // Columns i to i + n of the memory, n up to N * 16, through all tokens.
  template <size_t N, bool CHANNELS>
  static void delta_rule_some(const DeltaRule& r, size_t i, size_t n) {
    const auto part = [n](size_t d) { return at_most(n - d * 16, 16); };
    for (size_t token = 0; token < r.count; ++token) {
      const float *q = r.q + token * r.k_dim, *k = r.k + token * r.k_dim, *faded = r.faded + token * r.k_dim;
      const float* decays = r.decay + token * (CHANNELS ? r.k_dim : 1);
      const F beta = all(r.beta[token]);
      F decay = all(decays[0]);
      F known[N], learned[N], read[N];
      UNROLL for (size_t d = 0; d < N; ++d) known[d] = read[d] = zero();
      float* memory = r.memory + i;
      for (size_t j = 0; j < r.k_dim; ++j, memory += r.v_dim) {
        UNROLL for (size_t d = 0; d < N; ++d)
          known[d] = fma(load_some(memory + d * 16, part(d)), all(faded[j]), known[d]);
      }
      UNROLL for (size_t d = 0; d < N; ++d) {
        const F value = load_some(r.v + token * r.v_stride + i + d * 16, part(d));
        learned[d] = mul(beta, sub(value, known[d]));
      }
      memory = r.memory + i;
      for (size_t j = 0; j < r.k_dim; ++j, memory += r.v_dim) {
        if constexpr (CHANNELS) decay = all(decays[j]);
        UNROLL for (size_t d = 0; d < N; ++d) {
          const F now = fma(all(k[j]), learned[d], mul(load_some(memory + d * 16, part(d)), decay));
          store_some(memory + d * 16, now, part(d));
          read[d] = fma(now, all(q[j]), read[d]);
        }
      }
      UNROLL for (size_t d = 0; d < N; ++d)
        store_some(r.out + token * r.out_stride + i + d * 16, read[d], part(d));
    }
  }

  template <bool CHANNELS>
  static void delta_rule_all(const DeltaRule& r) {
    size_t i = 0;
    for (; i + WIDE * 16 <= r.v_dim; i += WIDE * 16) delta_rule_some<WIDE, CHANNELS>(r, i, WIDE * 16);
    for (; i < r.v_dim; i += 16) delta_rule_some<1, CHANNELS>(r, i, at_most(r.v_dim - i, 16));
  }

  static void delta_rule(const DeltaRule& r) { r.channels ? delta_rule_all<true>(r) : delta_rule_all<false>(r); }

  static void gate_by(const float* x, const float* gate, size_t width, float* out) {
    by_lanes(width, [&](size_t i, size_t n) {
      store_some(out + i, times_sigmoid(load_some(x + i, n), load_some(gate + i, n)), n);
    });
  }

  static void decay(const float* x, const float* bias, float rate, size_t width, float* out) {
    by_lanes(width, [&](size_t i, size_t n) {
      const F gate = softplus(add(load_some(x + i, n), load_some(bias + i, n)));
      store_some(out + i, exp(mul(all(rate), gate)), n);
    });
  }

  static constexpr DeltaKernels table() { return {convolve, delta_rule, gate_by, decay}; }
};

}  // namespace
}  // namespace penstock
