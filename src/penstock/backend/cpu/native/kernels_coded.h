// Products with quantized panels, for tiles of one to ROWS rows.
//
// A panel is read once for all rows of a tile, whose sums stay in registers. Each group of codes is unpacked into a
// register and multiplied with every row of the tile at once, so codes never pass through memory again: unpacking them
// for the next tile costs less than storing them and loading them back. Integer dot products of a block are exact; its
// scales follow in one order for all sizes of tiles.
#pragma once

namespace penstock {
namespace {

// Whether codes are multiplied as they are stored: those that begin at 0, and where bytes may have a sign those that a
// number is to be subtracted from. Codes of 8 bits have none to spare for a sign.
template <class Q>
constexpr bool AS_STORED = SIGNED_BYTES ? !Q::TABLED && Q::LOW < 8 : Q::MINIMA;

// By how much codes are higher than the numbers that they stand for.
template <class Q>
constexpr int EXCESS = AS_STORED<Q> ? Q::ZERO : Q::MINIMA ? -128 : SIGNED_BYTES ? 0 : 128;

// What undoes that in a dot product with values of x, given -128 times their sum.
template <class Q>
INLINE int32_t excess_of(int32_t offset) {
  return EXCESS<Q> == 128 ? offset : offset / 128 * EXCESS<Q>;
}

// Sums of dot products. SHORT: 16 bits hold those of all the values that share a scale.
template <bool SIGNED, bool SHORT>
struct Dots {
  I sums;

  INLINE void add(Codes codes, Four x) { sums = dot<SIGNED>(sums, codes, x); }
  INLINE I total() const { return sums; }
};

template <class Q>
using DotsOf = Dots<!AS_STORED<Q>, 8 / Q::GROUPS * ((1 << (Q::LOW + Q::HIGH)) - 1) * 2 * 127 <= INT16_MAX>;

template <class Q, int GROUP>
INLINE Codes codes_of(const std::byte* block, const int8_t* table) {
  constexpr int HIGH = Q::HIGH ? Q::HIGH : 1;
  Codes codes = field<GROUP / Q::LOW * Q::LOW, Q::LOW>(load_codes(block + GROUP % Q::LOW * 64));
  if constexpr (Q::HIGH)
    codes = join<Q::LOW>(codes, field<GROUP / HIGH * HIGH, HIGH>(load_codes(block + Packed<Q>::HIGH + GROUP % HIGH * 64)));
  if constexpr (Q::TABLED) return centered(lookup(codes, table), 0);
  return AS_STORED<Q> ? codes : centered(codes, Q::MINIMA ? 128 : Q::ZERO);
}

template <class Q>
INLINE F factor(const std::byte* head, const std::byte* own, size_t group) {
  if constexpr (Q::SCALE == Scale::HALF_TIMES_BYTE)
    return mul(load((const uint16_t*)head), load((const int8_t*)own + group * LANES));
  if constexpr (Q::SCALE == Scale::GROUPED) return load((const uint16_t*)head);
  if constexpr (Q::SCALE == Scale::E4M3) return load_e4m3((const uint8_t*)head + group * LANES);
  if constexpr (Q::SCALE == Scale::E8M0) return load_e8m0((const uint8_t*)head + group * LANES);
  return load((const uint16_t*)own + group * LANES);
}

// The addend of scale * number.
template <class Q>
INLINE F minimum_of(const std::byte* head, const std::byte* block, size_t group, F scale, Grouping grouping) {
  const F minimum = factor<Q>(head + LANES * 2, block + Packed<Q>::MINIMA, group);
  return Packed<Q>::GROUPED && grouping.zeros ? mul(minimum, scale) : minimum;
}

// The sum of the numbers that share scale H.
template <class Q, int H, int... GROUP>
INLINE F numbers_of(const std::byte* block, const int8_t* table, std::integer_sequence<int, GROUP...>) {
  static constexpr int8_t ONES[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};  // ARM reads a whole vector
  DotsOf<Q> numbers = {all(-EXCESS<Q> * int(BLOCK / Q::GROUPS))};
  (numbers.add(codes_of<Q, H * 4 + GROUP>(block, table), spread(ONES, 0)), ...);
  return to_float(numbers.total());
}

// The sum of scale * number of a block, which multiplies a middle of x.
template <class Q>
INLINE F total_of(const std::byte* head, const std::byte* block, const int8_t* table) {
  constexpr std::make_integer_sequence<int, 8 / Q::GROUPS> groups;
  const std::byte* scales = block + Packed<Q>::SCALES;
  F total = fma(factor<Q>(head, scales, 0), numbers_of<Q, 0>(block, table, groups), zero());
  if constexpr (Q::GROUPS == 2) total = fma(factor<Q>(head, scales, 1), numbers_of<Q, 1>(block, table, groups), total);
  return total;
}

// N rows of x, and their products with one panel.
template <class Q, size_t N>
struct CodedTile {
  using P = Packed<Q>;
  const CodeBlock* x[N];
  F sums[N];

  // Of N rows the first `own` count; those after them repeat the last.
  CodedTile(const PanelProduct& p, size_t row, size_t own) {
    UNROLL for (size_t i = 0; i < N; ++i) x[i] = (const CodeBlock*)(p.x + (row + at_most(i, own - 1)) * p.x_stride);
  }

  INLINE void multiply(const PanelProduct& p, const std::byte* panel) {
    UNROLL for (size_t i = 0; i < N; ++i) sums[i] = zero();
    for (size_t b = 0; b < p.width / BLOCK; ++b) {
      const std::byte *head = panel + P::head(b, p.grouping), *block = panel + P::at(b, p.grouping);
      add_scaled<0>(p, head, block, b);
      if constexpr (Q::GROUPS == 2) add_scaled<1>(p, head, block, b);
      if (p.middles) add_middles(total_of<Q>(head, block, p.table), b);
    }
    if constexpr (Q::TABLED)
      UNROLL for (size_t i = 0; i < N; ++i) sums[i] = mul(sums[i], all(p.factor));
  }

  // Those values of block b that share scale H.
  template <int H>
  INLINE void add_scaled(const PanelProduct& p, const std::byte* head, const std::byte* block, size_t b) {
    constexpr size_t WHOLE = Q::GROUPS == 1 ? 2 : H;
    DotsOf<Q> dots[N];
    UNROLL for (size_t i = 0; i < N; ++i) dots[i] = {all(excess_of<Q>(x[i][b].offset[WHOLE]))};
    add_groups<H * 4>(block, p.table, b, dots, std::make_integer_sequence<int, 8 / Q::GROUPS>{});
    const F scale = factor<Q>(head, block + P::SCALES, H);
    UNROLL for (size_t i = 0; i < N; ++i)
      sums[i] = fma(to_float(dots[i].total()), mul(scale, all(x[i][b].scale)), sums[i]);
    if constexpr (Q::MINIMA) {
      const F minimum = minimum_of<Q>(head, block, H, scale, p.grouping);
      UNROLL for (size_t i = 0; i < N; ++i) sums[i] = fma(minimum, all(x[i][b].sum[WHOLE]), sums[i]);
    }
  }

  template <int FIRST, int... GROUP>
  INLINE void add_groups(const std::byte* block, const int8_t* table, size_t b, DotsOf<Q> (&dots)[N],
                         std::integer_sequence<int, GROUP...>) {
    (add_group<FIRST + GROUP>(block, table, b, dots), ...);
  }

  template <int GROUP>
  INLINE void add_group(const std::byte* block, const int8_t* table, size_t b, DotsOf<Q> (&dots)[N]) {
    fetch<GROUP>(block);
    const Codes codes = codes_of<Q, GROUP>(block, table);
    UNROLL for (size_t i = 0; i < N; ++i) dots[i].add(codes, spread(x[i][b].q, GROUP));
  }

  INLINE void add_middles(F total, size_t b) {
    UNROLL for (size_t i = 0; i < N; ++i) sums[i] = fma(total, all(x[i][b].middle), sums[i]);
  }

  // Asks for memory that will be read soon, a few lines with each group. Panels follow each other, so what follows a
  // block is the next to be read. It goes to the second-level cache: in the first, lines that are waited for would keep
  // those of x from being read. One row does nothing but read in order, which the CPU foresees better by itself.
  template <int GROUP>
  INLINE void fetch(const std::byte* block) const {
    constexpr size_t AHEAD = 8192, LINES = (P::BLOCK_BYTES + (P::SCALE ? 0 : P::HEAD) + 63) / 64;
    if constexpr (N > 1)
      UNROLL for (size_t line = GROUP; line < LINES; line += 8) __builtin_prefetch(block + AHEAD + line * 64, 0, 2);
  }
};

// Panels [first, last) times the rows of one tile, the first `own` of N.
template <class Q, size_t N>
[[gnu::noinline]] void multiply_tile(const PanelProduct& p, size_t row, size_t own, size_t first, size_t last) {
  CodedTile<Q, N> tile(p, row, own);
  for (size_t panel = first; panel < last; ++panel) {
    tile.multiply(p, p.panels + panel * p.panel_bytes);
    if (p.partners) {
      F gates[N];
      UNROLL for (size_t i = 0; i < N; ++i) gates[i] = tile.sums[i];
      tile.multiply(p, p.partners + panel * p.panel_bytes);
      UNROLL for (size_t i = 0; i < N; ++i) tile.sums[i] = mul(silu(gates[i]), tile.sums[i]);
    }
    UNROLL for (size_t i = 0; i < N; ++i)
      if (i < own) finish(p, panel, row + i, tile.sums[i]);
  }
}

// Rows of the tile that multiplies `rows`. Of grouped kinds, which few models have, most tiles have an even number of
// rows: that is half as much code.
template <class Q>
constexpr size_t tile_rows(size_t rows) {
  return Packed<Q>::GROUPED && rows > 1 ? at_most(rows + rows % 2, ROWS) : rows;
}

// Tiles of rows take turns with as many panels as stay in the second-level cache meanwhile.
template <class Q>
void coded_product(const PanelProduct& p) {
  constexpr size_t NEAR_BYTES = 131072;
  const size_t panels = (p.columns + LANES - 1) / LANES;
  const size_t step = NEAR_BYTES / (p.panel_bytes * (p.partners ? 2 : 1)) + 1;
  for (size_t first = 0; first < panels; first += step)
    by_tiles<ROWS>(p.rows, [&]<size_t N>(Count<N>, size_t row) {
      multiply_tile<Q, tile_rows<Q>(N)>(p, row, N, first, at_most(first + step, panels));
    });
}

}  // namespace
}  // namespace penstock
