// MLA over a tile of keys, whose last v_dim dimensions are the values. This file is a part of kernels_body.h.
namespace penstock {
namespace {

template <class T>
struct MlaKv {
  static constexpr size_t SIDE = QUERIES >= 8 ? 4 : 2;  // queries and positions of one pass

  static void store(const float* key, size_t dim, size_t v_dim, size_t lane, void* tile) {
    const size_t rotated = dim - v_dim;
    T* row = Tile<T>::keys(tile) + lane * dim;
    const Narrow<T> narrow_first(key, rotated, tile, lane), narrow_values(key + rotated, v_dim, tile, TILE + lane);
    for (size_t i = 0; i < rotated; i += 16) narrow_first(load(key + i), row + i);
    for (size_t i = rotated; i < dim; i += 16) narrow_values(load(key + i), row + i);
  }

  // Sums over the given dimensions of SIDE positions, times what their scales say.
  template <size_t N>
  static void add_some(const float* queries, size_t dim, const T* rows, const float* scales, size_t width, float* scores) {
    F sums[N][SIDE];
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t j = 0; j < SIDE; ++j) sums[i][j] = zero();
    for (size_t d = 0; d < width; d += 16) {
      F key[SIDE];
      UNROLL for (size_t j = 0; j < SIDE; ++j) key[j] = load(rows + j * dim + d);
      UNROLL for (size_t i = 0; i < N; ++i) {
        const F query = load(queries + i * dim + d);
        UNROLL for (size_t j = 0; j < SIDE; ++j) sums[i][j] = fma(query, key[j], sums[i][j]);
      }
    }
    UNROLL for (size_t i = 0; i < N; ++i)
      UNROLL for (size_t j = 0; j < SIDE; ++j)
        scores[i * SPAN + j] += Tile<T>::SCALED ? sum(sums[i][j]) * scales[j] : sum(sums[i][j]);
  }

  static void score(const float* queries, size_t count, size_t dim, size_t v_dim, const void* tile, float* scores) {
    const size_t rotated = dim - v_dim;
    const float* scales = Tile<T>::scales(tile);
    by_queries<SIDE>(0, count, [=]<size_t N>(size_t i) {
      const float* mine = queries + i * dim;
      for (size_t j = 0; j < TILE; j += SIDE) {
        const T* rows = Tile<T>::keys(tile) + j * dim;
        float* to = scores + i * SPAN + j;
        for (size_t k = 0; k < N; ++k)
          for (size_t l = 0; l < SIDE; ++l) to[k * SPAN + l] = 0;
        add_some<N>(mine, dim, rows, scales + j, rotated, to);
        add_some<N>(mine + rotated, dim, rows + rotated, scales + TILE + j, v_dim, to);
      }
    });
  }

  static void mix(const float* weights, size_t count, const void* tile, size_t n, size_t dim, size_t v_dim, float* out) {
    Kv<T>::mix_rows(weights, count, Tile<T>::scales(tile) + TILE, Tile<T>::keys(tile) + dim - v_dim, dim, n, v_dim, out);
  }

  static void copy(const void* from, size_t from_lane, size_t dim, void* to, size_t to_lane) {
    __builtin_memcpy(Tile<T>::keys(to) + to_lane * dim, Tile<T>::keys(from) + from_lane * dim, dim * sizeof(T));
    if constexpr (Tile<T>::SCALED)
      for (size_t part : {size_t(0), TILE}) Tile<T>::scale(to, part + to_lane) = Tile<T>::scales(from)[part + from_lane];
  }

  static constexpr MlaKernels table() { return {store, score, mix, copy}; }
};

inline void index_scores(const float* scores, const float* weights, size_t heads, size_t n, float* out) {
  for (size_t i = 0; i < n; i += 16) {
    F total = zero();
    for (size_t head = 0; head < heads; ++head)
      total = fma(max(load(scores + head * SPAN + i), zero()), all(weights[head]), total);
    penstock::store(out + i, total);
  }
}

}  // namespace
}  // namespace penstock
