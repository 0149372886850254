// The inner loops of ops on parts of rows, over the lanes of one ISA (see kernels_body.h).

namespace penstock {
namespace {

struct Streams {
  static void add_scaled(const float* x, size_t width, float factor, float* out) {
    by_lanes(width, [&](size_t i, size_t n) {
      store_some(out + i, fma(load_some(x + i, n), all(factor), load_some(out + i, n)), n);
    });
  }

  static float mean_square(const float* x, size_t width) {
    F squares = zero();
    by_lanes(width, [&](size_t i, size_t n) {
      const F value = load_some(x + i, n);
      squares = fma(value, value, squares);
    });
    return sum(squares) / float(width);
  }

  // What lies in `out` meanwhile is read back with zeros after it, which count nothing.
  static void cut_off(const float* x, size_t width, float deviations, float* out) {
    F values = zero();
    by_lanes(width, [&](size_t i, size_t n) { values = add(values, load_some(x + i, n)); });
    const F mean = all(sum(values) / float(width));
    by_lanes(width, [&](size_t i, size_t n) { store_some(out + i, sub(load_some(x + i, n), mean), n); });
    const F lowest = all(deviations * __builtin_sqrtf(mean_square(out, width)));
    by_lanes(width, [&](size_t i, size_t n) { store_some(out + i, max(sub(load_some(out + i, n), lowest), zero()), n); });
  }

  static constexpr StreamKernels table() { return {add_scaled, mean_square, cut_off}; }
};

}  // namespace
}  // namespace penstock
