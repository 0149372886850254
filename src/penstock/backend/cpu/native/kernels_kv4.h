// One side of a tile of the KV cache in 4 bits. This file is a part of kernels_body.h.
//
// Runs of KV_GROUP dimensions have a scale of 16 bits for each position: [dim / 32][16] of them come first. A byte holds
// codes of dimensions d and d + 16 of a run: the first in its low half, 8 too high, the second in its high half, with a
// sign. Bytes: keys [dim / 2][16 positions], values [16 positions][dim / 2].
namespace penstock {
namespace {

// A run's scale is such that its largest value, by magnitude, has the code -8, which has no counterpart.
struct Run {
  int8_t codes[16];
  uint16_t scale;

  explicit Run(const float* x) {
    const F top = all(3.4e38f), low = bounded(load(x), top), high = bounded(load(x + 16), top);
    const float most = maximum(max(low, high)), least = -maximum(max(sub(zero(), low), sub(zero(), high)));
    const float wanted = -least >= most ? least / -8.0f : most / -8.0f;
    uint16_t halves[16];
    store(halves, bounded(all(wanted), all(65504.0f)));
    scale = halves[0];
    const F by = load(halves);
    store_bytes(codes, add(code(low, by, 8), times_16(code(high, by, 0))));
  }

  static F bounded(F x, F most) { return min(max(x, sub(zero(), most)), most); }
  I code(F x, F by, int excess) const {
    if (!(scale & 0x7fff)) return all(int32_t(excess));
    return add(to_int(min(max(div(x, by), all(-8.0f)), all(7.0f))), all(int32_t(excess)));
  }
  static I times_16(I x) { return to_int(mul(to_float(x), all(16.0f))); }
};

struct Kv4 {
  static constexpr size_t HALF = KV_GROUP / 2;

  static const int8_t* codes(const void* side, size_t dim) {
    return (const int8_t*)side + dim / KV_GROUP * TILE * sizeof(uint16_t);
  }
  static int8_t* codes(void* side, size_t dim) { return (int8_t*)codes((const void*)side, dim); }
  static const uint16_t* scales(const void* side, size_t run) { return (const uint16_t*)side + run * TILE; }

  static void store_key(const float* key, size_t dim, size_t lane, void* side) {
    int8_t* to = codes(side, dim) + lane;
    for (size_t d = 0; d < dim; d += KV_GROUP) {
      const Run run(key + d);
      ((uint16_t*)side)[d / KV_GROUP * TILE + lane] = run.scale;
      for (size_t i = 0; i < HALF; ++i) to[(d / 2 + i) * TILE] = run.codes[i];
    }
  }

  static void store_value(const float* value, size_t dim, size_t padded, size_t lane, void* side) {
    int8_t* to = codes(side, padded) + lane * padded / 2;
    for (size_t d = 0; d < dim; d += KV_GROUP) {
      const Run run(value + d);
      ((uint16_t*)side)[d / KV_GROUP * TILE + lane] = run.scale;
      __builtin_memcpy(to + d / 2, run.codes, HALF);
    }
  }

  template <size_t N>
  static void score_some(const float* queries, size_t dim, const void* side, Prefetch prefetch, float* scores) {
    const int8_t* keys = codes(side, dim);
    F total[N];
    UNROLL for (size_t i = 0; i < N; ++i) total[i] = zero();
    for (size_t d = 0; d < dim; d += KV_GROUP) {
      F low[N], high[N];
      UNROLL for (size_t i = 0; i < N; ++i) low[i] = high[i] = zero();
      for (size_t r = 0; r < HALF; ++r) {
        prefetch();
        const Nibbles key = load_nibbles(keys + (d / 2 + r) * TILE);
        UNROLL for (size_t i = 0; i < N; ++i) {
          low[i] = fma(key.low, all(queries[i * dim + d + r]), low[i]);
          high[i] = fma(key.high, all(queries[i * dim + d + HALF + r]), high[i]);
        }
      }
      const F by = load(scales(side, d / KV_GROUP));
      UNROLL for (size_t i = 0; i < N; ++i) total[i] = fma(add(low[i], high[i]), by, total[i]);
    }
    UNROLL for (size_t i = 0; i < N; ++i) store(scores + i * SPAN, total[i]);
  }

  static void score(const float* queries, size_t count, size_t dim, const void* side, const void* soon,
                    size_t soon_bytes, float* scores) {
    const Prefetch prefetch(soon, soon_bytes, dim / 2);
    by_queries<QUERIES>(0, count, [=]<size_t N>(size_t i) {
      score_some<N>(queries + i * dim, dim, side, prefetch, scores + i * SPAN);
    });
  }

  // Of one run of dimensions.
  template <size_t N>
  static void mix_some(const float* weights, const uint16_t* by, const int8_t* values, size_t n, size_t padded,
                       float* out) {
    F low[N], high[N];
    float shares[N][TILE];
    UNROLL for (size_t i = 0; i < N; ++i) {
      low[i] = load(out + i * padded);
      high[i] = load(out + i * padded + 16);
      store(shares[i], mul(load_some(weights + i * SPAN, n), load(by)));
    }
    for (size_t j = 0; j < n; ++j) {
      const Nibbles value = load_nibbles(values + j * padded / 2);
      UNROLL for (size_t i = 0; i < N; ++i) {
        const F share = all(shares[i][j]);
        low[i] = fma(value.low, share, low[i]);
        high[i] = fma(value.high, share, high[i]);
      }
    }
    UNROLL for (size_t i = 0; i < N; ++i) {
      store(out + i * padded, low[i]);
      store(out + i * padded + 16, high[i]);
    }
  }

  static void mix(const float* weights, size_t count, const void* side, size_t n, size_t padded, float* out) {
    by_queries<MIXED>(0, count, [=]<size_t N>(size_t i) {
      for (size_t d = 0; d < padded; d += KV_GROUP)
        mix_some<N>(weights + i * SPAN, scales(side, d / KV_GROUP), codes(side, padded) + d / 2, n, padded,
                    out + i * padded + d);
    });
  }

  static constexpr KvKernels table() { return {store_key, score, store_value, mix}; }
};

inline void hadamard(float* x, size_t dim) {
  const size_t run = dim & (0 - dim);
  for (size_t half = 1; half < run; half *= 2)
    for (size_t i = 0; i < dim; i += 2 * half)
      for (size_t j = i; j < i + half; ++j) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
  scale(x, dim, 1.0f / __builtin_sqrtf(float(run)));
}

}  // namespace
}  // namespace penstock
