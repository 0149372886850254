// One tile of the KV cache: what is stored, scores, the running softmax, and the moe of values.
#include <algorithm>
#include <limits>

#include "check.h"
#include "half.h"

namespace penstock::test {

namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

float value_of(float stored) { return stored; }
float value_of(uint16_t stored) { return from_half(stored); }
float value_of(int8_t stored) { return stored; }

// What a row is stored as, and the scale that 8-bit values are multiples of.
struct AsFloats {
  using Value = float;
  static constexpr const char* NAME = "f32";
  static constexpr size_t SCALES = 0;
  explicit AsFloats(const float*, size_t) {}
  float operator()(float value) const { return std::clamp(value, -3.4e38f, 3.4e38f); }
};
struct AsHalves {
  using Value = uint16_t;
  static constexpr const char* NAME = "f16";
  static constexpr size_t SCALES = 0;
  explicit AsHalves(const float*, size_t) {}
  uint16_t operator()(float value) const { return to_half(std::clamp(value, -65504.0f, 65504.0f)); }
};
struct AsBytes {
  using Value = int8_t;
  static constexpr const char* NAME = "int8";
  static constexpr size_t SCALES = KV_SCALES;
  float largest = 0;
  AsBytes(const float* row, size_t dim) {
    for (size_t d = 0; d < dim; ++d) largest = std::max(largest, std::min(std::fabs(row[d]), 3.4e38f));
  }
  int8_t operator()(float value) const {
    return int8_t(std::nearbyint(std::clamp(value * (largest > 0 ? 127.0f / largest : 0.0f), -127.0f, 127.0f)));
  }
};

template <class As>
struct Tile {
  using T = typename As::Value;

  const KvKernels& kernels;
  std::string what;
  size_t dim, padded;
  std::vector<float> keys, values;  // [16][dim]
  std::vector<float> memory;        // scales [2][16], keys [dim][16], values [16][padded]

  Tile(const Isa& isa, const KvKernels& kernels, size_t dim, bool extreme)
      : kernels(kernels), what(isa.name + " " + As::NAME + " KV, " + std::to_string(dim) + ": "), dim(dim),
        padded((dim + 15) / 16 * 16), memory(As::SCALES + TILE * (dim + padded) * sizeof(T) / sizeof(float)) {
    Random random(dim);
    keys = random.floats(TILE * dim, 4);
    values = random.floats(TILE * dim, 4);
    if (extreme) {
      keys[0] = 1e9f;
      values[1] = -INFINITE;
      values[dim + 2] = 1e-6f;  // no normal number of 16 bits
      std::fill_n(values.begin() + ptrdiff_t(2 * dim), dim, 0.0f);
    }
    for (size_t lane = 0; lane < TILE; ++lane)
      kernels.store(keys.data() + lane * dim, values.data() + lane * dim, dim, padded, lane, memory.data());
  }

  T key(size_t lane, size_t d) const { return ((const T*)(memory.data() + As::SCALES))[d * TILE + lane]; }
  T value(size_t lane, size_t d) const {
    return ((const T*)(memory.data() + As::SCALES))[TILE * dim + lane * padded + d];
  }
  double scale(size_t which) const { return As::SCALES ? memory[which] : 1; }

  void test_store() const {
    for (size_t lane = 0; lane < TILE; ++lane) {
      const As key_as(keys.data() + lane * dim, dim), value_as(values.data() + lane * dim, dim);
      for (size_t d = 0; d < dim; ++d) {
        check(key(lane, d) == key_as(keys[lane * dim + d]), what + "key");
        check(value(lane, d) == value_as(values[lane * dim + d]), what + "value");
      }
      if constexpr (As::SCALES > 0) {
        check(memory[lane] == key_as.largest / 127.0f, what + "scale of a key");
        check(memory[TILE + lane] == value_as.largest / 127.0f, what + "scale of a value");
      }
    }
  }

  void test_score(size_t count) const {
    Random random(count);
    const auto queries = random.floats(count * dim);
    std::vector<float> scores((count - 1) * SPAN + TILE), alone(TILE);
    kernels.score(queries.data(), count, dim, memory.data(), memory.data(), scores.data());
    for (size_t i = 0; i < count; ++i) {
      kernels.score(queries.data() + i * dim, 1, dim, memory.data(), memory.data(), alone.data());
      const auto together = scores.begin() + ptrdiff_t(i * SPAN);
      check(same_bits({together, together + TILE}, alone), what + "a query scores otherwise among others");
      for (size_t lane = 0; lane < TILE; ++lane) {
        double want = 0;
        for (size_t d = 0; d < dim; ++d) want += double(queries[i * dim + d]) * value_of(key(lane, d)) * scale(lane);
        check(near(alone[lane], want, 3e-7 * double(dim)), what + "score");
      }
    }
  }

  void test_mix(size_t count, size_t n) const {
    Random random(count * n);
    const auto weights = random.floats((count - 1) * SPAN + n);
    const auto before = random.floats(count * padded);
    auto mixed = before;
    kernels.mix(weights.data(), count, memory.data(), n, dim, padded, mixed.data());
    for (size_t i = 0; i < count; ++i) {
      const auto first = ptrdiff_t(i * padded), last = first + ptrdiff_t(padded);
      std::vector<float> alone(before.begin() + first, before.begin() + last);
      kernels.mix(weights.data() + i * SPAN, 1, memory.data(), n, dim, padded, alone.data());
      check(same_bits({mixed.begin() + first, mixed.begin() + last}, alone),
            what + "a query mixes otherwise among others");
      for (size_t d = 0; d < dim; ++d) {
        double want = before[i * padded + d];
        for (size_t lane = 0; lane < n; ++lane)
          want += double(weights[i * SPAN + lane]) * value_of(value(lane, d)) * scale(TILE + lane);
        check(near(alone[d], want, 5e-6), what + "moe");
      }
    }
  }
};

template <class As>
void test_tiles(const Isa& isa, const KvKernels& kernels) {
  for (size_t dim : {8, 48, 64, 80}) {
    Tile<As>(isa, kernels, dim, true).test_store();
    const Tile<As> tile(isa, kernels, dim, false);
    for (size_t count : {1, 2, 3, 4, 5, 7, 9, 12}) {
      tile.test_score(count);
      for (size_t n : {1, 7, 16}) tile.test_mix(count, n);
    }
  }
}

void test_soften(const Isa& isa, size_t n, float highest, size_t hidden) {
  Random random(n + hidden);
  auto scores = random.floats(n, 12);
  std::fill_n(scores.begin(), hidden, -INFINITE);
  const auto before = random.floats(32);
  const float most = std::max(highest, *std::max_element(scores.begin(), scores.end()));
  auto weights = scores, out = before;
  float found = highest, total = 2;
  isa.kernels->soften(weights.data(), n, found, total, out.size(), out.data());
  const std::string what = isa.name + " soften " + std::to_string(n);
  check(found == most, what + ": maximum");
  const double shrunk = std::exp(double(highest) - most);
  double sum = 2 * shrunk;
  for (size_t i = 0; i < n; ++i) {
    const double want = std::exp(double(scores[i]) - most);
    check(near(weights[i], want, 4e-6 * want), what);
    sum += want;
  }
  check(near(total, sum, 4e-6 * sum), what + ": sum");
  for (size_t d = 0; d < out.size(); ++d)
    check(near(out[d], before[d] * shrunk, 4e-6 * std::fabs(before[d] * shrunk)), what + ": what was gathered");
}

}  // namespace

void test_attention(const Isa& isa) {
  test_tiles<AsFloats>(isa, isa.kernels->f32);
  test_tiles<AsHalves>(isa, isa.kernels->f16);
  test_tiles<AsBytes>(isa, isa.kernels->int8);
  for (size_t n : {16, 48, 128})
    for (float highest : {-INFINITE, -3.0f, 20.0f})
      for (size_t hidden : {0, 9}) test_soften(isa, n, highest, hidden);
}

}  // namespace penstock::test
