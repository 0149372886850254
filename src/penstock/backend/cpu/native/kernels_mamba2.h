// The inner loops of Mamba2, over the lanes of one ISA (see kernels_body.h).

namespace penstock {
namespace {

struct Mamba2 {
  // Columns i to i + n of the memory, n up to N * 16, through all tokens.
  template <size_t N>
  static void scan_some(const SelectiveScan& s, size_t i, size_t n) {
    const auto part = [n](size_t d) { return at_most(n - d * 16, 16); };
    for (size_t token = 0; token < s.count; ++token) {
      const float *b = s.b + token * s.stride, *c = s.c + token * s.stride;
      const F decay = all(s.decay[token]), dt = all(s.dt[token]);
      F added[N], read[N];
      UNROLL for (size_t d = 0; d < N; ++d) {
        const F x = load_some(s.x + token * s.stride + i + d * 16, part(d));
        added[d] = mul(x, dt);
        read[d] = mul(x, all(s.skip));
      }
      float* memory = s.memory + i;
      for (size_t j = 0; j < s.state_dim; ++j, memory += s.head_dim) {
        UNROLL for (size_t d = 0; d < N; ++d) {
          const F now = fma(all(b[j]), added[d], mul(load_some(memory + d * 16, part(d)), decay));
          store_some(memory + d * 16, now, part(d));
          read[d] = fma(now, all(c[j]), read[d]);
        }
      }
      UNROLL for (size_t d = 0; d < N; ++d) store_some(s.out + token * s.out_stride + i + d * 16, read[d], part(d));
    }
  }

  static void scan(const SelectiveScan& s) {
    size_t i = 0;
    for (; i + WIDE * 16 <= s.head_dim; i += WIDE * 16) scan_some<WIDE>(s, i, WIDE * 16);
    for (; i < s.head_dim; i += 16) scan_some<1>(s, i, at_most(s.head_dim - i, 16));
  }

  static void gate(const float* x, const float* z, float scale, size_t width, float* out) {
    by_lanes(width, [&](size_t i, size_t n) {
      store_some(out + i, mul(load_some(x + i, n), silu(mul(load_some(z + i, n), all(scale)))), n);
    });
  }

  static constexpr Mamba2Kernels table() { return {scan, gate}; }
};

}  // namespace
}  // namespace penstock
