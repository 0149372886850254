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
  template <size_t N>
  static void delta_rule_some(const DeltaRule& r, size_t i, size_t n) {
    const auto part = [n](size_t d) { return at_most(n - d * 16, 16); };
    for (size_t token = 0; token < r.count; ++token) {
      const float *q = r.q + token * r.k_dim, *k = r.k + token * r.k_dim;
      const F decay = all(r.decay[token]), beta = all(r.beta[token]);
      F known[N], learned[N], read[N];
      UNROLL for (size_t d = 0; d < N; ++d) known[d] = read[d] = zero();
      float* memory = r.memory + i;
      for (size_t j = 0; j < r.k_dim; ++j, memory += r.v_dim) {
        UNROLL for (size_t d = 0; d < N; ++d)
          known[d] = fma(load_some(memory + d * 16, part(d)), all(k[j]), known[d]);
      }
      UNROLL for (size_t d = 0; d < N; ++d) {
        const F value = load_some(r.v + token * r.v_stride + i + d * 16, part(d));
        learned[d] = mul(beta, sub(value, mul(decay, known[d])));
      }
      memory = r.memory + i;
      for (size_t j = 0; j < r.k_dim; ++j, memory += r.v_dim) {
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

  static void delta_rule(const DeltaRule& r) {
    size_t i = 0;
    for (; i + WIDE * 16 <= r.v_dim; i += WIDE * 16) delta_rule_some<WIDE>(r, i, WIDE * 16);
    for (; i < r.v_dim; i += 16) delta_rule_some<1>(r, i, at_most(r.v_dim - i, 16));
  }

  static void gate_by(const float* x, const float* gate, size_t width, float* out) {
    by_lanes(width, [&](size_t i, size_t n) {
      store_some(out + i, times_sigmoid(load_some(x + i, n), load_some(gate + i, n)), n);
    });
  }

  static constexpr DeltaKernels table() { return {convolve, delta_rule, gate_by}; }
};

}  // namespace
}  // namespace penstock
