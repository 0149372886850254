// The inner loops of delta nets, over the lanes of one ISA (see kernels_body.h).

namespace penstock {
namespace {

struct Delta {
  static constexpr float LEAST_SQUARE = 1e-6f;  // added to the squares of a key
  static constexpr size_t LEAST_PACKED = 4;  // tokens: a copy there and back costs about what one of them does

  static void convolve(const Convolution& c) {
    by_lanes(c.width, [&](size_t i, size_t n) {
      F total = c.bias ? load_some(c.bias + i, n) : zero();
      for (size_t tap = 0; tap < c.conv_width; ++tap)
        if (c.seen[tap]) total = fma(load_some(c.seen[tap] + i, n), load_some(c.taps + tap * c.width + i, n), total);
      store_some(c.out + i, c.silu ? silu(total) : total, n);
    });
  }

  // Columns of a memory whose rows are `stride` apart, and where they begin among those of all.
  struct Part {
    float* memory;
    size_t stride, column;
  };

  // What the first token's key knows of n columns, up to N * 16.
  template <size_t N>
  static void look_up(const DeltaRule& r, const Part& part, size_t n, F* known) {
    UNROLL for (size_t d = 0; d < N; ++d) known[d] = zero();
    const float* memory = part.memory;
    for (size_t j = 0; j < r.k_dim; ++j, memory += part.stride) {
      UNROLL for (size_t d = 0; d < N; ++d)
        known[d] = fma(load_some(memory + d * 16, at_most(n - d * 16, 16)), all(r.faded[j]), known[d]);
    }
  }

  // One token: the memory learns and is read. On the way it is looked up for the NEXT token, if there is one.
  template <size_t N, bool CHANNELS, bool NEXT>
  static void learn(const DeltaRule& r, const Part& part, size_t n, size_t token, F* known) {
    const auto lanes = [n](size_t d) { return at_most(n - d * 16, 16); };
    const float *q = r.q + token * r.k_dim, *k = r.k + token * r.k_dim, *after = r.faded + (token + NEXT) * r.k_dim;
    const float* decays = r.decay + token * (CHANNELS ? r.k_dim : 1);
    F decay = all(decays[0]), learned[N], read[N], next[N];
    UNROLL for (size_t d = 0; d < N; ++d) {
      const F value = load_some(r.v + token * r.v_stride + part.column + d * 16, lanes(d));
      learned[d] = mul(all(r.beta[token]), sub(value, known[d]));
      read[d] = next[d] = zero();
    }
    float* memory = part.memory;
    for (size_t j = 0; j < r.k_dim; ++j, memory += part.stride) {
      if constexpr (CHANNELS) decay = all(decays[j]);
      UNROLL for (size_t d = 0; d < N; ++d) {
        const F now = fma(all(k[j]), learned[d], mul(load_some(memory + d * 16, lanes(d)), decay));
        store_some(memory + d * 16, now, lanes(d));
        read[d] = fma(now, all(q[j]), read[d]);
        if constexpr (NEXT) next[d] = fma(now, all(after[j]), next[d]);
      }
    }
    UNROLL for (size_t d = 0; d < N; ++d) {
      store_some(r.out + token * r.out_stride + part.column + d * 16, read[d], lanes(d));
      known[d] = next[d];
    }
  }

  static void copy_columns(const float* from, size_t from_stride, size_t rows, size_t n, float* to, size_t to_stride) {
    for (size_t j = 0; j < rows; ++j, from += from_stride, to += to_stride)
      by_lanes(n, [&](size_t i, size_t some) { store_some(to + i, load_some(from + i, some), some); });
  }

  // Columns i to i + n of the memory, n up to N * 16, through all tokens. For several tokens they are copied to where
  // they lie side by side: rows of the memory are a power of two apart, so that few of them fit into the L1 cache.
  template <size_t N, bool CHANNELS>
  static void delta_rule_some(const DeltaRule& r, size_t i, size_t n) {
    const bool packed = r.count >= LEAST_PACKED;
    const Part part = packed ? Part{r.columns, N * 16, i} : Part{r.memory + i, r.v_dim, i};
    if (packed) copy_columns(r.memory + i, r.v_dim, r.k_dim, n, part.memory, part.stride);
    F known[N];
    look_up<N>(r, part, n, known);
    for (size_t token = 0; token + 1 < r.count; ++token) learn<N, CHANNELS, true>(r, part, n, token, known);
    learn<N, CHANNELS, false>(r, part, n, r.count - 1, known);
    if (packed) copy_columns(part.memory, part.stride, r.k_dim, n, r.memory + i, r.v_dim);
  }

  template <bool CHANNELS>
  static void delta_rule_all(const DeltaRule& r) {
    static_assert(WIDE * 16 <= MAX_COLUMNS);
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

  static void unit(const float* x, size_t width, float factor, float* out) {
    F squares = zero();
    by_lanes(width, [&](size_t i, size_t n) {
      const F value = load_some(x + i, n);
      squares = fma(value, value, squares);
    });
    const F scale = all(factor / __builtin_sqrtf(sum(squares) + LEAST_SQUARE));
    by_lanes(width, [&](size_t i, size_t n) { store_some(out + i, mul(load_some(x + i, n), scale), n); });
  }

  static void fade(const float* k, const float* decay, bool channels, size_t width, float* out) {
    by_lanes(width, [&](size_t i, size_t n) {
      store_some(out + i, mul(load_some(k + i, n), channels ? load_some(decay + i, n) : all(decay[0])), n);
    });
  }

  static constexpr DeltaKernels table() { return {convolve, delta_rule, gate_by, decay, unit, fade}; }
};

}  // namespace
}  // namespace penstock
