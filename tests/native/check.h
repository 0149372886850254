// A tiny check, and random numbers that are the same on every CPU.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "dispatch.h"

namespace penstock::test {

void check(bool holds, const std::string& what);  // a failure is printed and counted

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  float within(float low, float high) { return low + (high - low) * float(bits() >> 40) * 0x1p-24f; }
  std::vector<float> floats(size_t n, float most = 1.0f) {
    std::vector<float> out(n);
    for (float& value : out) value = within(-most, most);
    return out;
  }

 private:
  uint64_t state_;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// What was computed differs from what is right by no more than `most`; a NaN is never right.
inline bool near(double got, double want, double most) { return std::fabs(got - want) <= most; }

inline const Kernels& generic() { return *choose("generic").kernels; }

void test_chain_hash();
void test_crc32();
void test_products(const Isa& isa);
void test_trellis(const Isa& isa);
void test_rows(const Isa& isa);
void test_delta(const Isa& isa);
void test_attention(const Isa& isa);

}  // namespace penstock::test
