// Products in tiles: AMX with BF16 and with 8-bit integers. All else is what AVX512-VNNI does.
//
// A product with a quantized weight differs from AVX512-VNNI's in nothing: the integer sums of a block are exact and
// the floats are added up in the same order, so rows may go either way. It is also slower as yet (0.7 to 0.9 of its
// speed: a block of 32 is too little for a tile), so `amx` leaves these products to vectors and `amx-int8` has to be
// asked for.
#include "lanes_avx512vnni.h"
#include "kernels_body.h"

namespace penstock {

const Kernels& avx512vnni_kernels();

namespace {

constexpr size_t TILE_ROWS = 16;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(size_t tile, size_t count, size_t bytes) {
    rows[tile] = uint8_t(count);
    row_bytes[tile] = uint16_t(bytes);
  }
};

// The tile registers of this thread, shaped while it lives; given up after, so that switching threads stays cheap.
struct Shaped {
  explicit Shaped(const TileShapes& shapes) { _tile_loadconfig(&shapes); }
  ~Shaped() { _tile_release(); }
};

// Tiles of one height that cover all rows. The last of them is full; others may end in a row that is the next one's.
struct Cover {
  size_t rows, tiles, height;

  explicit Cover(size_t rows) : rows(rows), tiles((rows + TILE_ROWS - 1) / TILE_ROWS), height((rows + tiles - 1) / tiles) {}
  size_t row(size_t tile) const { return rows * tile / tiles; }
  size_t own(size_t tile) const { return row(tile + 1) - row(tile); }
};

// ---- quantized formats: a tile product is the integer part of one block, or group of a block ----

// One panel's block of 32 as tiles and the vector units behind them use it.
template <class Q>
struct Ready {
  Codes codes[8];
  F scale[Q::GROUPS];
  F minimum[Q::MINIMA ? Q::GROUPS : 1];
  F total;  // sum of scale * number, which multiplies a middle of x

  template <int... GROUP>
  INLINE void unpack(const std::byte* block, const int8_t* table, std::integer_sequence<int, GROUP...>) {
    ((codes[GROUP] = codes_of<Q, GROUP>(block, table)), ...);
  }

  void prepare(const std::byte* panel, size_t b, const int8_t* table) {
    using P = Packed<Q>;
    const std::byte *head = panel + P::head(b, {}), *block = panel + P::at(b, {});
    unpack(block, table, std::make_integer_sequence<int, 8>{});
    total = total_of<Q>(head, block, table);
    UNROLL for (size_t h = 0; h < Q::GROUPS; ++h) {
      scale[h] = factor<Q>(head, block + P::SCALES, h);
      if constexpr (Q::MINIMA) minimum[h] = factor<Q>(head + LANES * 2, block + P::MINIMA, h);
    }
  }
};

// Products of all rows with two panels, or with one and its partner. The panels are made ready a span of blocks at a
// time, which fits the first-level cache; between spans the sums of a row are put aside.
template <class Q>
struct Tiled {
  static constexpr size_t DEPTH = 10;                 // blocks of a span
  static constexpr size_t BYTES = BLOCK / Q::GROUPS;  // one row of x in one tile product
  struct Span {
    size_t first, last;
    Ready<Q> ready[2][DEPTH];
    F aside[BAND][2];
  };

  const PanelProduct& p;
  size_t panel;
  Cover cover;

  static TileShapes shapes(size_t height) {
    TileShapes shapes;
    for (size_t i = 0; i < 2; ++i) {
      shapes.set(i, height, 64);
      shapes.set(2 + i, height, BYTES);
      shapes.set(4 + i, BYTES / 4, 64);
    }
    return shapes;
  }

  const std::byte* data(size_t j) const {
    if (j && p.partners) return p.partners + panel * p.panel_bytes;
    return p.panels + (panel + j) * p.panel_bytes;
  }

  void many_rows() const {
    const Shaped shaped(shapes(cover.height));
    const size_t blocks = p.width / BLOCK, spans = (blocks + DEPTH - 1) / DEPTH;
    Span span;
    for (size_t s = 0; s < spans; ++s) {
      span.first = blocks * s / spans;
      span.last = blocks * (s + 1) / spans;
      for (size_t j = 0; j < 2; ++j)
        for (size_t b = span.first; b < span.last; ++b) span.ready[j][b - span.first].prepare(data(j), b, p.table);
      for (size_t tile = 0; tile < cover.tiles; ++tile) add(cover.row(tile), cover.own(tile), span);
    }
  }

  void add(size_t row, size_t own, Span& span) const {
    F sums[2][TILE_ROWS];
    for (size_t j = 0; j < 2; ++j) add_panel(row, span, j, sums[j]);
    for (size_t i = 0; i < own; ++i) put(row + i, span, sums[0][i], sums[1][i]);
  }

  void put(size_t row, Span& span, F first, F second) const {
    if (span.last < p.width / BLOCK) {
      span.aside[row][0] = first;
      span.aside[row][1] = second;
    } else if (p.partners) {
      finish(p, panel, row, mul(silu(whole(first)), whole(second)));
    } else {
      finish(p, panel, row, whole(first));
      finish(p, panel + 1, row, whole(second));
    }
  }

  F whole(F sum) const { return Q::TABLED ? mul(sum, all(p.factor)) : sum; }

  // The tiles work on one product while the vector units still add up the one before.
  void add_panel(size_t row, Span& span, size_t j, F* out) const {
    alignas(64) int32_t dots[2][TILE_ROWS][LANES] = {};
    const CodeBlock* x[TILE_ROWS];
    F sums[TILE_ROWS];
    UNROLL for (size_t i = 0; i < TILE_ROWS; ++i) {
      const size_t at = row + at_most(i, cover.height - 1);
      x[i] = (const CodeBlock*)(p.x + at * p.x_stride);
      sums[i] = span.first ? span.aside[at][j] : zero();
    }
    const size_t products = (span.last - span.first) * Q::GROUPS;
    for (size_t n = 0; n <= products; ++n) {
      if (n < products) multiply(x[0], span, j, n, dots[n % 2]);
      if (n > 0) add_product(x, span, j, n - 1, dots[(n - 1) % 2], sums);
    }
    UNROLL for (size_t i = 0; i < TILE_ROWS; ++i) out[i] = sums[i];
  }

  INLINE void multiply(const CodeBlock* x, const Span& span, size_t j, size_t n, void* dots) const {
    const size_t b = n / Q::GROUPS, h = n % Q::GROUPS;
    const void* codes = &span.ready[j][b].codes[h * 8 / Q::GROUPS];
    const void* rows = x[span.first + b].q + h * BYTES;
#define MULTIPLY(C, A, B)                 \
  _tile_zero(C);                          \
  _tile_loadd(A, rows, p.x_stride);  \
  _tile_loadd(B, codes, 64);              \
  _tile_dpbsud(C, A, B);                  \
  _tile_stored(C, dots, 64)
    if (n % 2) {
      MULTIPLY(1, 3, 5);
    } else {
      MULTIPLY(0, 2, 4);
    }
#undef MULTIPLY
  }

  INLINE void add_product(const CodeBlock* const (&x)[TILE_ROWS], const Span& span, size_t j, size_t n,
                          const int32_t (&dots)[TILE_ROWS][LANES], F (&sums)[TILE_ROWS]) const {
    const size_t b = n / Q::GROUPS, h = n % Q::GROUPS, whole = Q::GROUPS == 1 ? 2 : h;
    const Ready<Q>& ready = span.ready[j][b];
    UNROLL for (size_t i = 0; i < TILE_ROWS; ++i) {
      const CodeBlock& block = x[i][span.first + b];
      I dot = _mm512_load_si512(dots[i]);
      if constexpr (!Q::MINIMA) dot = penstock::add(dot, all(block.offset[whole]));
      sums[i] = fma(to_float(dot), mul(ready.scale[h], all(block.scale)), sums[i]);
      if constexpr (Q::MINIMA) sums[i] = fma(ready.minimum[h], all(block.sum[whole]), sums[i]);
      if (p.middles && h + 1 == Q::GROUPS) sums[i] = fma(ready.total, all(block.middle), sums[i]);
    }
  }
};

template <class Q, size_t FORMAT>
void tiled_product(const PanelProduct& p) {
  const auto by_vectors = avx512vnni_kernels().product[FORMAT];
  if (p.rows <= ROWS) return by_vectors(p);
  const size_t panels = (p.columns + LANES - 1) / LANES, step = p.partners ? 1 : 2;
  size_t panel = 0;
  for (; panel + step <= panels; panel += step) Tiled<Q>{p, panel, Cover(p.rows)}.many_rows();
  if (panel == panels) return;
  PanelProduct last = p;
  last.panels += panel * p.panel_bytes;
  last.bias = p.bias ? p.bias + panel * LANES : nullptr;
  last.y += panel * LANES;
  last.columns -= panel * LANES;
  by_vectors(last);
}

// ---- BF16: sums stay in tiles over the whole width ----

void to_bfloats(const float* x, size_t width, uint16_t* out) {
  by_lanes((width + BLOCK - 1) / BLOCK * BLOCK, [&](size_t i, size_t n) {
    const size_t there = i < width ? at_most(n, width - i) : 0;
    _mm256_storeu_si256((__m256i*)(out + i), (__m256i)_mm512_cvtneps_pbh(load_some(x + i, there)));
  });
}

// Two tiles of rows by two panels. Where there is only one of either, it is taken twice.
void bfloat_tiles(const PanelProduct& p, const size_t (&row)[2], const size_t (&panel)[2], size_t height) {
  const std::byte* x[2];
  const std::byte* w[2];
  for (size_t i = 0; i < 2; ++i) {
    x[i] = p.x + row[i] * p.x_stride;
    w[i] = p.panels + panel[i] * p.panel_bytes;
  }
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (size_t b = 0; b < (p.width + BLOCK - 1) / BLOCK; ++b) {
    _tile_loadd(4, x[0] + b * 64, p.x_stride);
    _tile_loadd(6, w[0] + b * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w[1] + b * 1024, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x[1] + b * 64, p.x_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float sums[2][2][TILE_ROWS][LANES];
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[0][1], 64);
  _tile_stored(2, sums[1][0], 64);
  _tile_stored(3, sums[1][1], 64);
  for (size_t i = 0; i < 2; ++i)
    for (size_t j = 0; j < 2; ++j)
      for (size_t r = 0; r < height; ++r) finish(p, panel[j], row[i] + r, load(sums[i][j][r]));
}

void bfloat_product(const PanelProduct& p) {
  const Cover cover(p.rows);
  TileShapes shapes;
  for (size_t i = 0; i < 4; ++i) shapes.set(i, cover.height, 64);
  for (size_t i = 4; i < 6; ++i) shapes.set(i, cover.height, 64);
  for (size_t i = 6; i < 8; ++i) shapes.set(i, 16, 64);
  const Shaped shaped(shapes);
  const size_t panels = (p.columns + LANES - 1) / LANES;
  for (size_t panel = 0; panel < panels; panel += 2)
    for (size_t tile = 0; tile < cover.tiles; tile += 2)
      bfloat_tiles(p, {cover.row(tile), cover.row(at_most(tile + 1, cover.tiles - 1))},
                   {panel, at_most(panel + 1, panels - 1)}, cover.height);
}

Kernels bfloat_tiled() {
  Kernels kernels = avx512vnni_kernels();
  kernels.product[size_t(Format::BF16)] = bfloat_product;
  kernels.to_bfloats = to_bfloats;
  return kernels;
}

// The first format that has the same kind.
template <class Kind, class... Q>
constexpr size_t first_of(Types<Q...>) {
  constexpr bool same[] = {std::is_same_v<Kind, typename Q::Kind>...};
  size_t at = 0;
  while (!same[at]) ++at;
  return at;
}

// Grouped kinds stay with vectors.
template <class Q, size_t FORMAT, size_t FIRST>
void put_tiled(Kernels& kernels) {
  if constexpr (!Packed<Q>::GROUPED) kernels.product[FORMAT] = tiled_product<typename Q::Kind, FIRST>;
}

template <class... Q, size_t... AT>
Kernels all_tiled(Types<Q...> formats, std::index_sequence<AT...>) {
  Kernels kernels = bfloat_tiled();
  constexpr size_t FIRST = size_t(Format::QUANTIZED);
  (put_tiled<Q, FIRST + AT, FIRST + first_of<typename Q::Kind>(formats)>(kernels), ...);
  return kernels;
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels kernels = bfloat_tiled();
  return kernels;
}

const Kernels& amx_int8_kernels() {
  static const Kernels kernels = all_tiled(QuantizedFormats{}, std::make_index_sequence<QuantizedFormats::COUNT>{});
  return kernels;
}

}  // namespace penstock
