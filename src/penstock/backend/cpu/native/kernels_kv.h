// One side of a tile of the KV cache: the keys of 16 positions and one head, or their values. This file is a part of
// kernels_body.h.
namespace penstock {
namespace {

// Where the parts of a tile of MLA lie, and what its values are multiples of.
template <class T>
struct Tile {
  static constexpr bool SCALED = sizeof(T) == 1;
  static constexpr size_t SCALES = SCALED ? KV_SCALES * sizeof(float) : 0;

  static T* keys(void* tile) { return (T*)((std::byte*)tile + SCALES); }
  static const T* keys(const void* tile) { return (const T*)((const std::byte*)tile + SCALES); }
  static float& scale(void* tile, size_t which) { return ((float*)tile)[which]; }
  static const float* scales(const void* tile) { return (const float*)tile; }
};

// Where the values of a side lie: after the scale of each position, where its type has one.
template <class T>
struct Side {
  static constexpr size_t SCALES = sizeof(T) == 1 ? TILE * sizeof(float) : 0;

  static T* values(void* side) { return (T*)((std::byte*)side + SCALES); }
  static const T* values(const void* side) { return (const T*)((const std::byte*)side + SCALES); }
};

// Asks for a side's share of a tile that is read soon, a little with each step of a loop.
struct Prefetch {
  const std::byte* next;
  size_t step;

  Prefetch(const void* soon, size_t bytes, size_t steps) : next((const std::byte*)soon), step(bytes / steps) {}
  void operator()() {
    __builtin_prefetch(next, 0, 2);
    __builtin_prefetch(next + step / 2, 0, 2);
    next += step;
  }
};

// A vector's values as they are stored, 16 at a time.
template <class T>
struct Narrow {
  F highest = all(sizeof(T) == 2 ? 65504.0f : 3.4e38f), lowest = sub(zero(), highest);

  Narrow(const float*, size_t, void*, size_t) {}
  void operator()(F x, T* out) const { store(out, min(max(x, lowest), highest)); }
};

template <>
struct Narrow<int8_t> {
  F inverse;

  Narrow(const float* x, size_t dim, void* tile, size_t which) {
    F most = zero();
    by_lanes(dim, [&](size_t i, size_t n) { most = max(most, min(abs(load_some(x + i, n)), all(3.4e38f))); });
    const float largest = maximum(most);
    Tile<int8_t>::scale(tile, which) = largest / 127.0f;
    inverse = all(largest > 0 ? 127.0f / largest : 0.0f);
  }
  void operator()(F x, int8_t* out) const {
    store_bytes(out, to_int(min(max(mul(x, inverse), all(-127.0f)), all(127.0f))));
  }
};

template <class T>
struct Kv {
  static void store_key(const float* key, size_t dim, size_t lane, void* side) {
    const Narrow<T> narrow(key, dim, side, lane);
    T* keys = Side<T>::values(side);
    by_lanes(dim, [&](size_t i, size_t n) {
      T sixteen[16];
      narrow(load_some(key + i, n), sixteen);
      for (size_t j = 0; j < n; ++j) keys[(i + j) * TILE + lane] = sixteen[j];
    });
  }

  static void store_value(const float* value, size_t dim, size_t padded, size_t lane, void* side) {
    const Narrow<T> narrow(value, dim, side, lane);
    T* values = Side<T>::values(side) + lane * padded;
    by_lanes(dim, [&](size_t i, size_t n) { narrow(load_some(value + i, n), values + i); });
  }

  template <size_t N>
  static void score_some(const float* queries, size_t dim, const void* side, Prefetch prefetch, float* scores) {
    const T* keys = Side<T>::values(side);
    F even[N], odd[N];
    UNROLL for (size_t i = 0; i < N; ++i) even[i] = odd[i] = zero();
    for (size_t d = 0; d + 2 <= dim; d += 2) {
      prefetch();
      const F k0 = load(keys + d * TILE), k1 = load(keys + (d + 1) * TILE);
      UNROLL for (size_t i = 0; i < N; ++i) {
        even[i] = fma(k0, all(queries[i * dim + d]), even[i]);
        odd[i] = fma(k1, all(queries[i * dim + d + 1]), odd[i]);
      }
    }
    UNROLL for (size_t i = 0; i < N; ++i) {
      F score = add(even[i], odd[i]);
      if constexpr (Side<T>::SCALES > 0) score = mul(score, load((const float*)side));
      penstock::store(scores + i * SPAN, score);
    }
  }

  static void score(const float* queries, size_t count, size_t dim, const void* side, const void* soon,
                    size_t soon_bytes, float* scores) {
    const Prefetch prefetch(soon, soon_bytes, dim / 2);
    by_queries<QUERIES>(0, count, [=]<size_t N>(size_t i) {
      score_some<N>(queries + i * dim, dim, side, prefetch, scores + i * SPAN);
    });
  }

  template <size_t N, size_t D>
  static void mix_some(const float* weights, const float* scales, const T* values, size_t stride, size_t n,
                       size_t padded, float* out) {
    F sums[N][D], value[D];
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t d = 0; d < D; ++d) sums[i][d] = load(out + i * padded + d * 16);
    for (size_t j = 0; j < n; ++j) {
      UNROLL for (size_t d = 0; d < D; ++d) value[d] = load(values + j * stride + d * 16);
      UNROLL for (size_t i = 0; i < N; ++i) {
        const float weight = weights[i * SPAN + j];
        const F share = all(Side<T>::SCALES > 0 ? weight * scales[j] : weight);
        UNROLL for (size_t d = 0; d < D; ++d) sums[i][d] = fma(value[d], share, sums[i][d]);
      }
    }
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t d = 0; d < D; ++d) penstock::store(out + i * padded + d * 16, sums[i][d]);
  }

  static void mix(const float* weights, size_t count, const void* side, size_t n, size_t padded, float* out) {
    mix_rows(weights, count, (const float*)side, Side<T>::values(side), padded, n, padded, out);
  }

  // Of values that are `stride` apart.
  static void mix_rows(const float* weights, size_t count, const float* scales, const T* values, size_t stride,
                       size_t n, size_t padded, float* out) {
    by_queries<MIXED>(0, count, [=]<size_t N>(size_t i) {
      const float* mine = weights + i * SPAN;
      float* to = out + i * padded;
      size_t d = 0;
      for (; d + WIDE * 16 <= padded; d += WIDE * 16)
        mix_some<N, WIDE>(mine, scales, values + d, stride, n, padded, to + d);
      for (; d < padded; d += 16) mix_some<N, 1>(mine, scales, values + d, stride, n, padded, to + d);
    });
  }

  static constexpr KvKernels table() { return {store_key, score, store_value, mix}; }
};

}  // namespace
}  // namespace penstock
