// Products with EXL3 weights against numbers that are decoded one by one, as the format is described.
#include <bit>

#include "check.h"
#include "half.h"
#include "weights.h"

namespace penstock::test {

namespace {

constexpr size_t ROWS = 128, WIDTH = 256, ITEMS = 20;
const char* const BOOKS[] = {"3inst", "mcg", "mul1"};

double half_number(uint32_t bits) { return from_half(uint16_t(bits)); }

double number_of(uint32_t state, size_t book) {
  constexpr uint32_t FACTORS[] = {89226354, 0xcbac1fed, 0x83dcd12d};
  uint32_t product = state * FACTORS[book] + (book == 0 ? 64248484 : 0);
  if (book == 2) {
    const uint32_t sum = (product & 255) + (product >> 8 & 255) + (product >> 16 & 255) + (product >> 24);
    return (1024 + double(sum)) * half_number(0x1eee) + half_number(0xc931);
  }
  product = (product & 0x8fff8fff) ^ 0x3b603b60;
  return half_number(product & 0xffff) + half_number(product >> 16);
}

struct Case {
  size_t bits, book;
  std::vector<uint8_t> bytes;  // [rows / 16][width / 16] tiles
  std::vector<float> suh, svh;

  bool bit(size_t tile, size_t at) const {
    at %= 256 * bits;  // words of 32 bits, the highest first
    return bytes[tile * 32 * bits + at / 32 * 4 + (31 - at % 32) / 8] >> (31 - at % 32) % 8 & 1;
  }

  // [rows][width], between the Hadamard matrices
  std::vector<double> numbers() const {
    std::vector<double> found(ROWS * WIDTH);
    for (size_t tile = 0; tile < ROWS * WIDTH / 256; ++tile)
      for (size_t i = 0; i < 256; ++i) {
        uint32_t state = 0;
        for (size_t at = 0; at < 16; ++at) state = state << 1 | bit(tile, 256 * bits + (i + 1) * bits - 16 + at);
        const size_t lane = i / 8, own = i % 8;
        const size_t in = lane % 4 * 2 + own % 2 + own % 4 / 2 * 8, out = lane / 4 + own / 4 * 8;
        found[(tile / (WIDTH / 16) * 16 + out) * WIDTH + tile % (WIDTH / 16) * 16 + in] = number_of(state, book);
      }
    return found;
  }
};

// Times the normalized Hadamard matrix, 128 values at a time.
std::vector<double> turned(const std::vector<double>& x) {
  std::vector<double> found(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t j = 0; j < 128; ++j)
      found[i] += (std::popcount(i % 128 & j) % 2 ? -1 : 1) * x[i / 128 * 128 + j] / std::sqrt(128.0);
  return found;
}

std::vector<double> wanted(const Case& made, const std::vector<double>& numbers, const float* x, const float* bias) {
  std::vector<double> scaled(WIDTH), sums(ROWS);
  for (size_t k = 0; k < WIDTH; ++k) scaled[k] = double(x[k]) * made.suh[k];
  const auto rotated = turned(scaled);
  for (size_t row = 0; row < ROWS; ++row)
    for (size_t k = 0; k < WIDTH; ++k) sums[row] += numbers[row * WIDTH + k] * rotated[k];
  auto found = turned(sums);
  for (size_t row = 0; row < ROWS; ++row) found[row] = found[row] * made.svh[row] + bias[row];
  return found;
}

std::vector<float> product(const Kernels& kernels, const Weight& weight, const float* x, size_t items,
                           const float* bias) {
  const Part& part = weight.parts()[0];
  std::vector<float> rotated(items * WIDTH), y(items * ROWS);
  for (size_t item = 0; item < items; ++item)
    kernels.trellis.rotate_inputs(x + item * WIDTH, part.trellis->inputs.data(), WIDTH, rotated.data() + item * WIDTH);
  kernels.trellis.product[size_t(part.trellis->code_book)]({
      .panels = part.data,
      .panel_bytes = part.panel_bytes,
      .count = part.panels,
      .steps = &part.trellis->steps,
      .width = WIDTH,
      .x = rotated.data(),
      .x_stride = WIDTH,
      .rows = items,
      .y = y.data(),
      .y_stride = ROWS,
  });
  for (size_t item = 0; item < items; ++item)
    kernels.trellis.rotate_outputs(part.trellis->outputs.data(), bias, ROWS, y.data() + item * ROWS);
  return y;
}

void test_code(const Isa& isa, size_t bits, size_t book) {
  const std::string format = "EXL3-" + std::to_string(bits) + "-" + BOOKS[book], what = isa.name + " " + format;
  Random random(bits * 3 + book);
  Case made = {bits, book, std::vector<uint8_t>(ROWS * WIDTH * bits / 8), random.floats(WIDTH), random.floats(ROWS)};
  for (uint8_t& byte : made.bytes) byte = uint8_t(random.bits());
  Weight weight(WIDTH, {{format, ROWS}});
  check(weight.bytes() == made.bytes.size(), what + " takes more memory than its bits");
  weight.fill(0, 0, ROWS, made.bytes.data(), made.bytes.size());
  weight.set_trellis(0, made.suh, made.svh);
  const auto numbers = made.numbers();
  const auto x = random.floats(ITEMS * WIDTH), bias = random.floats(ROWS);
  const auto alone = product(*isa.kernels, weight, x.data(), 1, bias.data());
  const auto want = wanted(made, numbers, x.data(), bias.data());
  bool good = true;
  for (size_t row = 0; row < ROWS; ++row) good &= near(alone[row], want[row], 1e-4);
  check(good, what);
  for (size_t items : {2, 3, 5, 8, 9, 20}) {
    auto together = product(*isa.kernels, weight, x.data(), items, bias.data());
    together.resize(ROWS);
    check(same_bits(together, alone), what + ": a row changes among " + std::to_string(items));
  }
}

}  // namespace

void test_trellis(const Isa& isa) {
  for (size_t bits = 1; bits <= TRELLIS_BITS; ++bits)
    for (size_t book = 0; book < CODE_BOOKS; ++book) test_code(isa, bits, book);
}

}  // namespace penstock::test
