// Products with packed panels, and what all of them use. The rules of kernels_body.h hold.
#include <utility>

#include "kernels.h"

#if !defined(UNROLLED) || !defined(__OPTIMIZE__)
#define UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE [[gnu::always_inline]] inline  // results must stay in registers

#include "kernels_functions.h"

namespace penstock {
namespace {

inline constexpr size_t at_most(size_t value, size_t limit) { return value < limit ? value : limit; }

template <size_t N>
struct Count {};

template <size_t MOST, class With>
inline void with_count(size_t rows, size_t row, With with) {
  if (rows == MOST) return with(Count<MOST>{}, row);
  if constexpr (MOST > 1) with_count<MOST - 1>(rows, row, with);
}

// Calls with(Count<n>, row) for tiles of at most MOST rows, of nearly equal size.
template <size_t MOST, class With>
inline void by_tiles(size_t rows, With with) {
  const size_t tiles = (rows + MOST - 1) / MOST;
  for (size_t i = 0; i < tiles; ++i)
    with_count<MOST>(rows * (i + 1) / tiles - rows * i / tiles, rows * i / tiles, with);
}

inline void finish(const PanelProduct& p, size_t panel, size_t row, F sums) {
  const size_t column = panel * LANES, lanes = at_most(p.columns - column, LANES);
  float* y = p.y + row * p.y_stride + column;
  if (p.bias) sums = add(sums, load_some(p.bias + column, lanes));
  if (p.add) sums = add(load_some(y, lanes), sums);
  store_some(y, sums, lanes);
}

// Two consecutive values of 16 rows.
struct Two {
  F even, odd;
};
template <class T>
struct Apart {
  using Value = T;
  static Two load(const T* p) { return {penstock::load(p), penstock::load(p + 16)}; }
};
struct Bfloats {
  using Value = uint16_t;
  static Two load(const uint16_t* p) { return {even_bfloats(p), odd_bfloats(p)}; }
};

template <class Float>
struct Plain {
  template <size_t N>
  static void rows(const PanelProduct& p, size_t panel, size_t row) {
    const auto* values = (const typename Float::Value*)(p.panels + panel * p.panel_bytes);
    const float* x[N];
    F even[N], odd[N];  // two chains hide the latency of the sum
    UNROLL for (size_t i = 0; i < N; ++i) {
      x[i] = (const float*)(p.x + (row + i) * p.x_stride);
      even[i] = odd[i] = zero();
    }
    size_t k = 0;
    for (; k + 2 <= p.width; k += 2) {
      const Two w = Float::load(values + k * 16);
      UNROLL for (size_t i = 0; i < N; ++i) {
        even[i] = fma(w.even, all(x[i][k]), even[i]);
        odd[i] = fma(w.odd, all(x[i][k + 1]), odd[i]);
      }
    }
    if (k < p.width)
      UNROLL for (size_t i = 0; i < N; ++i) even[i] = fma(Float::load(values + k * 16).even, all(x[i][k]), even[i]);
    UNROLL for (size_t i = 0; i < N; ++i) finish(p, panel, row + i, add(even[i], odd[i]));
  }

  static void product(const PanelProduct& p) {
    for (size_t panel = 0; panel * LANES < p.columns; ++panel) {
      by_tiles<PLAIN_ROWS>(p.rows, [&]<size_t N>(Count<N>, size_t row) { rows<N>(p, panel, row); });
    }
  }
};

}  // namespace
}  // namespace penstock

#include "kernels_coded.h"
