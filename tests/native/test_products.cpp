// Products with packed weights of every format, against sums in double precision of what the weight reads back as.
#include <algorithm>
#include <limits>

#include "check.h"
#include "half.h"
#include "weights.h"

namespace penstock::test {

namespace {

// Random bytes are a block of any format but for its scales, which must be finite.
struct Storage {
  const char* format;
  size_t values, bytes;
  std::vector<size_t> scales;  // where they lie
  void (*put)(Random&, uint8_t*);
};

template <class T>
void write(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof value);
}
void put_float(Random& random, uint8_t* p) { write(p, random.within(-1, 1)); }
void put_half(Random& random, uint8_t* p) { write(p, to_half(random.within(-1, 1))); }
void put_bfloat(Random& random, uint8_t* p) { write(p, uint16_t(std::bit_cast<uint32_t>(random.within(-1, 1)) >> 16)); }
void put_exponent(Random& random, uint8_t* p) { *p = uint8_t(random.within(120, 132)); }
void put_small(Random& random, uint8_t* p) { *p = uint8_t(random.within(1, 100)); }
void put_scale(Random& random, uint8_t* p) {
  put_half(random, p);
  write(p + 2, to_half(float(random.bits() % 16)));  // a zero point
}
void put_nibbles(Random& random, uint8_t* p) {
  const uint16_t half = to_half(random.within(-1, 1));
  for (int i = 0; i < 4; ++i) p[1 + i * 2] = uint8_t((p[1 + i * 2] & 15) | (half >> i * 4 & 15) << 4);
}

const Storage STORED[] = {
    {"F32", 1, 4, {0}, put_float},        {"F16", 1, 2, {0}, put_half},          {"BF16", 1, 2, {0}, put_bfloat},
    {"Q4_0", 32, 18, {0}, put_half},      {"Q4_1", 32, 20, {0, 2}, put_half},    {"Q5_0", 32, 22, {0}, put_half},
    {"Q5_1", 32, 24, {0, 2}, put_half},   {"Q8_0", 32, 34, {0}, put_half},       {"Q2_K", 256, 84, {80, 82}, put_half},
    {"Q3_K", 256, 110, {108}, put_half},  {"Q4_K", 256, 144, {0, 2}, put_half},  {"Q5_K", 256, 176, {0, 2}, put_half},
    {"Q6_K", 256, 210, {208}, put_half},  {"IQ4_NL", 32, 18, {0}, put_half},     {"IQ4_XS", 256, 136, {0}, put_half},
    {"MXFP4", 32, 17, {0}, put_exponent}, {"NVFP4", 64, 36, {0, 1, 2, 3}, put_small},
    {"IQ1_S", 256, 50, {0}, put_half},    {"IQ1_M", 256, 56, {48}, put_nibbles}, {"IQ2_XXS", 256, 66, {0}, put_half},
    {"IQ2_XS", 256, 74, {0}, put_half},   {"IQ2_S", 256, 82, {0}, put_half},     {"IQ3_XXS", 256, 98, {0}, put_half},
    {"IQ3_S", 256, 110, {0}, put_half},   {"TQ1_0", 256, 54, {52}, put_half},    {"TQ2_0", 256, 66, {64}, put_half},
    {"NF4", 32, 20, {0}, put_float},      {"U4_MIN_64", 64, 36, {0, 2}, put_half},
    {"U6_MIN_64", 64, 52, {0, 2}, put_half},   {"U8_MIN_64", 64, 68, {0, 2}, put_half},
    {"U6_MIN_32", 32, 28, {0, 2}, put_half},   {"U8_MIN_32", 32, 36, {0, 2}, put_half},
    {"U4_ZERO_64", 64, 36, {0}, put_scale},    {"U4_ZERO_32", 32, 20, {0}, put_scale},
    {"U8_ZERO_64", 64, 68, {0}, put_scale},    {"U8_ZERO_32", 32, 36, {0}, put_scale},
};
static_assert(std::size(STORED) == FORMATS);

void fill(Weight& weight, size_t part, size_t rows, const Storage& stored, Random& random) {
  std::vector<uint8_t> bytes(rows * weight.width() / stored.values * stored.bytes);
  for (uint8_t& byte : bytes) byte = uint8_t(random.bits());
  for (size_t at = 0; at < bytes.size(); at += stored.bytes)
    for (size_t scale : stored.scales) stored.put(random, bytes.data() + at + scale);
  weight.fill(part, 0, rows, bytes.data(), bytes.size());
}

// Rows as the kernels want them for this weight: floats, CodeBlocks or BF16.
struct Inputs {
  size_t rows, width;
  bool middles;
  std::vector<float> floats;
  std::vector<CodeBlock> codes;
  std::vector<uint16_t> bfloats;  // of whole blocks

  Inputs(const Kernels& kernels, const Weight& weight, size_t rows, bool middles, Random& random)
      : rows(rows), width(weight.width()), middles(middles), floats(random.floats(rows * width)) {
    if (weight.coded()) {
      codes.resize(rows * width / BLOCK);
      kernels.quantize(floats.data(), rows * width, middles, codes.data());
    }
    if (!weight.bfloat() || !kernels.to_bfloats) return;
    bfloats.resize(rows * bfloat_width());
    for (size_t row = 0; row < rows; ++row)
      kernels.to_bfloats(floats.data() + row * width, width, bfloats.data() + row * bfloat_width());
  }
  size_t bfloat_width() const { return (width + BLOCK - 1) / BLOCK * BLOCK; }
  double value(size_t row, size_t k) const {
    const size_t at = row * width + k;
    const CodeBlock* block = codes.empty() ? nullptr : &codes[at / BLOCK];
    if (block) return double(block->scale) * block->q[at % BLOCK] + block->middle;
    return bfloats.empty() ? floats[at] : from_bfloat(bfloats[row * bfloat_width() + k]);
  }
  const std::byte* data(size_t row) const {
    if (!codes.empty()) return (const std::byte*)codes.data() + row * stride();
    return (bfloats.empty() ? (const std::byte*)floats.data() : (const std::byte*)bfloats.data()) + row * stride();
  }
  size_t stride() const {
    if (!codes.empty()) return width / BLOCK * sizeof(CodeBlock);
    return bfloats.empty() ? width * sizeof(float) : bfloat_width() * sizeof(uint16_t);
  }
};

// Rows [first, first + count) of x times every row of the weight or, gated, of one half of it with that of the other.
std::vector<float> product(const Kernels& kernels, const Weight& weight, const Inputs& x, size_t first, size_t count,
                           bool gated = false) {
  const size_t parts = gated ? 2 : 1, columns = weight.rows() / parts, panels = weight.panels() / parts;
  std::vector<float> y(count * columns, std::numeric_limits<float>::quiet_NaN());
  for (size_t panel = 0; panel < panels;) {
    const Run run = weight.panels(panel, panels - panel);
    kernels.product[size_t(run.part->format)]({
        .panels = run.data,
        .partners = gated ? weight.panels(panel + panels, 1).data : nullptr,
        .panel_bytes = run.part->panel_bytes,
        .width = weight.width(),
        .x = x.data(first),
        .x_stride = x.stride(),
        .rows = count,
        .middles = x.middles,
        .bias = weight.bias(run.column),
        .y = y.data() + run.column,
        .y_stride = columns,
        .columns = run.columns,
        .table = run.part->table,
        .factor = run.part->factor,
        .grouping = run.part->grouping,
    });
    panel += run.panels;
  }
  return y;
}

std::vector<float> one_by_one(const Kernels& kernels, const Weight& weight, const Inputs& x) {
  std::vector<float> all;
  for (size_t row = 0; row < x.rows; ++row) {
    const auto one = product(kernels, weight, x, row, 1);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

// Sums in single precision, of blocks or of values, stray from the exact one by a few units of the largest term's.
bool all_near(const std::vector<float>& got, const Weight& weight, const Inputs& x) {
  constexpr double MOST = 4e-6;
  std::vector<float> values(x.width);
  for (size_t column = 0; column < weight.rows(); ++column) {
    weight.read_row(column, values.data());
    double largest = 0;
    for (float value : values) largest = std::max(largest, std::fabs(double(value)));
    for (size_t row = 0; row < x.rows; ++row) {
      double want = *weight.bias(column), size = 0;
      for (size_t k = 0; k < x.width; ++k) {
        want += x.value(row, k) * values[k];
        size += std::fabs(x.value(row, k));
      }
      if (!near(got[row * weight.rows() + column], want, MOST * largest * size)) return false;
    }
  }
  return true;
}

void test_shape(const Isa& isa, const Storage& stored, size_t columns, size_t width, bool middles = false) {
  const std::string shape = std::to_string(columns) + "x" + std::to_string(width);
  const std::string what = isa.name + " product " + stored.format + " " + shape + (middles ? " with middles" : "");
  Random random(columns * width);
  Weight weight(width, {{stored.format, columns}});
  fill(weight, 0, columns, stored, random);
  weight.set_bias(random.floats(columns));
  const Inputs x(*isa.kernels, weight, 20, middles, random);
  const auto alone = one_by_one(*isa.kernels, weight, x);
  check(all_near(alone, weight, x), what);
  for (size_t count : {2, 3, 4, 5, 6, 7, 8, 9, 13, 20}) {
    const auto together = product(*isa.kernels, weight, x, 0, count);
    check(same_bits(together, {alone.begin(), alone.begin() + ptrdiff_t(together.size())}),
          what + ": a row changes among " + std::to_string(count));
  }
  // Integer dots are exact and what follows them is in one order: only plain C++ rounds products before it adds them.
  if (weight.coded() && isa.name != "generic")
    check(same_bits(alone, one_by_one(*isas().front().kernels, weight, x)),
          what + ": not that of " + isas().front().name);
}

// The largest codes times the largest activations: no sum of integers may overflow.
void test_extremes(const Isa& isa, const Storage& stored) {
  constexpr size_t COLUMNS = 16, WIDTH = 256;
  Random random(7);
  for (float sign : {1.0f, -1.0f}) {
    Weight weight(WIDTH, {{stored.format, COLUMNS}});
    std::vector<uint8_t> bytes(COLUMNS * WIDTH / stored.values * stored.bytes, 0xff);
    for (size_t at = 0; at < bytes.size(); at += stored.bytes)
      for (size_t scale : stored.scales) stored.put(random, bytes.data() + at + scale);
    weight.fill(0, 0, COLUMNS, bytes.data(), bytes.size());
    weight.set_bias(std::vector<float>(COLUMNS));
    Inputs x(*isa.kernels, weight, 5, false, random);
    std::fill(x.floats.begin(), x.floats.end(), sign);
    isa.kernels->quantize(x.floats.data(), x.floats.size(), false, x.codes.data());
    check(all_near(product(*isa.kernels, weight, x, 0, x.rows), weight, x),
          isa.name + " product " + stored.format + " of the largest values");
  }
}

void test_gated(const Isa& isa, const Storage& stored, size_t hidden, size_t width) {
  Random random(hidden);
  Weight weight(width, {{stored.format, hidden}, {stored.format, hidden}});
  fill(weight, 0, hidden, stored, random);
  fill(weight, 1, hidden, stored, random);
  if (!weight.gateable()) return;
  const Inputs x(*isa.kernels, weight, 7, false, random);
  for (size_t count = 1; count <= x.rows; ++count) {
    const auto both = product(*isa.kernels, weight, x, 0, count);
    std::vector<float> apart(count * hidden);
    for (size_t row = 0; row < count; ++row)
      isa.kernels->gate(both.data() + row * 2 * hidden, hidden, apart.data() + row * hidden);
    check(same_bits(product(*isa.kernels, weight, x, 0, count, true), apart),
          isa.name + " gated product " + stored.format + ", " + std::to_string(count) + " rows");
  }
}

}  // namespace

void test_products(const Isa& isa) {
  for (const Storage& stored : STORED) {
    test_shape(isa, stored, 49, 1024);
    test_shape(isa, stored, 49, 1024, true);
    test_shape(isa, stored, 5, 256);
    test_shape(isa, stored, 48, stored.values == 256 ? 512 : 64);
    if (stored.values == 1) test_shape(isa, stored, 17, 37);
    test_gated(isa, stored, 40, 256);
    if (stored.values > 1) test_extremes(isa, stored);
  }
}

}  // namespace penstock::test
