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
  static constexpr size_t SCALES = TILE;
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
  std::vector<float> key_side, value_side;  // scales [16], then keys [dim][16] or values [16][padded]

  Tile(const Isa& isa, const KvKernels& kernels, size_t dim, bool extreme)
      : kernels(kernels), what(isa.name + " " + As::NAME + " KV, " + std::to_string(dim) + ": "), dim(dim),
        padded((dim + 15) / 16 * 16), key_side(As::SCALES + TILE * dim * sizeof(T) / sizeof(float)),
        value_side(As::SCALES + TILE * padded * sizeof(T) / sizeof(float)) {
    Random random(dim);
    keys = random.floats(TILE * dim, 4);
    values = random.floats(TILE * dim, 4);
    if (extreme) {
      keys[0] = 1e9f;
      values[1] = -INFINITE;
      values[dim + 2] = 1e-6f;  // no normal number of 16 bits
      std::fill_n(values.begin() + ptrdiff_t(2 * dim), dim, 0.0f);
    }
    for (size_t lane = 0; lane < TILE; ++lane) {
      kernels.store_key(keys.data() + lane * dim, dim, lane, key_side.data());
      kernels.store_value(values.data() + lane * dim, dim, padded, lane, value_side.data());
    }
  }

  T key(size_t lane, size_t d) const { return ((const T*)(key_side.data() + As::SCALES))[d * TILE + lane]; }
  T value(size_t lane, size_t d) const {
    return ((const T*)(value_side.data() + As::SCALES))[lane * padded + d];
  }
  double scale(const std::vector<float>& side, size_t lane) const { return As::SCALES ? side[lane] : 1; }

  void test_store() const {
    for (size_t lane = 0; lane < TILE; ++lane) {
      const As key_as(keys.data() + lane * dim, dim), value_as(values.data() + lane * dim, dim);
      for (size_t d = 0; d < dim; ++d) {
        check(key(lane, d) == key_as(keys[lane * dim + d]), what + "key");
        check(value(lane, d) == value_as(values[lane * dim + d]), what + "value");
      }
      if constexpr (As::SCALES > 0) {
        check(key_side[lane] == key_as.largest / 127.0f, what + "scale of a key");
        check(value_side[lane] == value_as.largest / 127.0f, what + "scale of a value");
      }
    }
  }

  void test_score(size_t count) const {
    Random random(count);
    const auto queries = random.floats(count * dim);
    std::vector<float> scores((count - 1) * SPAN + TILE), alone(TILE);
    kernels.score(queries.data(), count, dim, key_side.data(), key_side.data(), 0, scores.data());
    for (size_t i = 0; i < count; ++i) {
      kernels.score(queries.data() + i * dim, 1, dim, key_side.data(), key_side.data(), 0, alone.data());
      const auto together = scores.begin() + ptrdiff_t(i * SPAN);
      check(same_bits({together, together + TILE}, alone), what + "a query scores otherwise among others");
      for (size_t lane = 0; lane < TILE; ++lane) {
        double want = 0;
        for (size_t d = 0; d < dim; ++d) want += double(queries[i * dim + d]) * value_of(key(lane, d)) * scale(key_side, lane);
        check(near(alone[lane], want, 3e-7 * double(dim)), what + "score");
      }
    }
  }

  void test_mix(size_t count, size_t n) const {
    Random random(count * n);
    const auto weights = random.floats((count - 1) * SPAN + n);
    const auto before = random.floats(count * padded);
    auto mixed = before;
    kernels.mix(weights.data(), count, value_side.data(), n, padded, mixed.data());
    for (size_t i = 0; i < count; ++i) {
      const auto first = ptrdiff_t(i * padded), last = first + ptrdiff_t(padded);
      std::vector<float> alone(before.begin() + first, before.begin() + last);
      kernels.mix(weights.data() + i * SPAN, 1, value_side.data(), n, padded, alone.data());
      check(same_bits({mixed.begin() + first, mixed.begin() + last}, alone),
            what + "a query mixes otherwise among others");
      for (size_t d = 0; d < dim; ++d) {
        double want = before[i * padded + d];
        for (size_t lane = 0; lane < n; ++lane)
          want += double(weights[i * SPAN + lane]) * value_of(value(lane, d)) * scale(value_side, lane);
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

// 4 bits: what is read back of a key is found by queries of one dimension, of a value by a weight of one position.
struct NibbleTile {
  static constexpr size_t DIM = 96;
  std::vector<float> keys, values, key_side = side(), value_side = side();

  static std::vector<float> side() { return std::vector<float>(TILE * (DIM / 2 + DIM / KV_GROUP * 2) / sizeof(float)); }

  explicit NibbleTile(const KvKernels& kernels) {
    Random random(4);
    keys = random.floats(TILE * DIM, 4);
    values = random.floats(TILE * DIM, 4);
    std::fill_n(values.begin(), KV_GROUP, 0.0f);
    values[DIM] = -1e9f;  // its scale is beyond 16 bits
    for (size_t lane = 0; lane < TILE; ++lane) {
      kernels.store_key(keys.data() + lane * DIM, DIM, lane, key_side.data());
      kernels.store_value(values.data() + lane * DIM, DIM, DIM, lane, value_side.data());
    }
  }

  // What 4 bits make of one value of a row.
  static float stored(const float* row, size_t d) {
    const float* run = row + d / KV_GROUP * KV_GROUP;
    const float most = *std::max_element(run, run + KV_GROUP), least = *std::min_element(run, run + KV_GROUP);
    const float scale = from_half(to_half(std::clamp((-least >= most ? least : most) / -8.0f, -65504.0f, 65504.0f)));
    return scale == 0 ? 0 : scale * std::nearbyint(std::clamp(row[d] / scale, -8.0f, 7.0f));
  }
};

void test_nibbles(const Isa& isa) {
  const KvKernels& kernels = isa.kernels->int4;
  const NibbleTile tile(kernels);
  constexpr size_t DIM = NibbleTile::DIM;
  const std::string what = isa.name + " int4 KV: ";
  std::vector<float> queries(DIM * DIM), scores((DIM - 1) * SPAN + TILE), together = scores;
  for (size_t d = 0; d < DIM; ++d) queries[d * DIM + d] = 1;
  kernels.score(queries.data(), DIM, DIM, tile.key_side.data(), tile.key_side.data(), 0, scores.data());
  for (size_t d = 0; d < DIM; ++d)
    for (size_t lane = 0; lane < TILE; ++lane)
      check(scores[d * SPAN + lane] == NibbleTile::stored(&tile.keys[lane * DIM], d), what + "key");
  for (size_t lane = 0; lane < TILE; ++lane) {
    std::vector<float> weights(TILE), mixed(DIM);
    weights[lane] = 1;
    kernels.mix(weights.data(), 1, tile.value_side.data(), lane + 1, DIM, mixed.data());
    for (size_t d = 0; d < DIM; ++d)
      check(mixed[d] == NibbleTile::stored(&tile.values[lane * DIM], d), what + "value");
  }
  Random random(5);
  const auto some = random.floats(9 * DIM), weights = random.floats(8 * SPAN + TILE);
  std::vector<float> all(9 * DIM);
  kernels.score(some.data(), 9, DIM, tile.key_side.data(), tile.key_side.data(), 0, together.data());
  kernels.mix(weights.data(), 9, tile.value_side.data(), 7, DIM, all.data());
  for (size_t i = 0; i < 9; ++i) {
    std::vector<float> score(TILE), mixed(DIM);
    kernels.score(&some[i * DIM], 1, DIM, tile.key_side.data(), tile.key_side.data(), 0, score.data());
    kernels.mix(&weights[i * SPAN], 1, tile.value_side.data(), 7, DIM, mixed.data());
    check(same_bits({&together[i * SPAN], &together[i * SPAN] + TILE}, score), what + "a query scores otherwise");
    check(same_bits({&all[i * DIM], &all[i * DIM] + DIM}, mixed), what + "a query mixes otherwise");
    for (size_t lane = 0; lane < TILE; ++lane) {
      double want = 0;
      for (size_t d = 0; d < DIM; ++d) want += double(some[i * DIM + d]) * NibbleTile::stored(&tile.keys[lane * DIM], d);
      check(near(score[lane], want, 3e-7 * DIM), what + "score");
    }
  }
}

// A Hadamard transform changes no product, and a second one takes the first back. 96 is three runs of 32.
void test_hadamard(const Isa& isa) {
  for (size_t dim : {32, 64, 96}) {
    Random random(dim);
    const auto before = random.floats(dim);
    auto x = before;
    isa.kernels->hadamard(x.data(), dim);
    float first = 0;
    for (size_t d = 0; d < (dim & (0 - dim)); ++d) first += before[d];
    check(near(x[0], first / std::sqrt(double(dim & (0 - dim))), 1e-5), isa.name + " hadamard: first");
    isa.kernels->hadamard(x.data(), dim);
    for (size_t d = 0; d < dim; ++d) check(near(x[d], before[d], 1e-5), isa.name + " hadamard: twice");
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
  test_nibbles(isa);
  test_hadamard(isa);
  for (size_t n : {16, 48, 128})
    for (float highest : {-INFINITE, -3.0f, 20.0f})
      for (size_t hidden : {0, 9}) test_soften(isa, n, highest, hidden);
}

}  // namespace penstock::test
