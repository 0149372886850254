// The inner loops of Mamba and of gated convolutions, over the lanes of one ISA (see kernels_body.h).

namespace penstock {
namespace {

struct Mamba {
  // Channels i to i + n, n up to 16, through all tokens.
  static void scan_some(const ChannelScan& r, size_t i, size_t n) {
    const F skip = load_some(r.skip + i, n);
    for (size_t token = 0; token < r.count; ++token) {
      const F x = load_some(r.x + token * r.stride + i, n), step = softplus(load_some(r.dt + token * r.stride + i, n));
      const float *b = r.b + token * r.state_size, *c = r.c + token * r.state_size;
      const F input = mul(step, x);
      F read = mul(skip, x);
      for (size_t j = 0; j < r.state_size; ++j) {
        float* at = r.state + j * r.channels + i;
        const F decay = exp(mul(step, load_some(r.decay + j * r.channels + i, n)));
        const F now = fma(input, all(b[j]), mul(load_some(at, n), decay));
        store_some(at, now, n);
        read = fma(now, all(c[j]), read);
      }
      const F gate = load_some(r.gate + token * r.gate_stride + i, n);
      store_some(r.out + token * r.stride + i, mul(read, silu(gate)), n);
    }
  }

  static void scan(const ChannelScan& r) {
    by_lanes(r.channels, [&](size_t i, size_t n) { scan_some(r, i, n); });
  }

  static void multiply(const float* x, const float* y, size_t width, float* out) {
    by_lanes(width, [&](size_t i, size_t n) { store_some(out + i, mul(load_some(x + i, n), load_some(y + i, n)), n); });
  }

  static constexpr MambaKernels table() { return {scan, multiply}; }
};

}  // namespace
}  // namespace penstock
