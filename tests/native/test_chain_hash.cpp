// Digests against those of Python's hashlib.
#include <cstdio>

#include "chain_hash.h"
#include "check.h"

namespace penstock::test {

namespace {

std::string hex(const Digest& digest) {
  std::string text;
  char two[3];
  for (uint8_t byte : digest) {
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

}  // namespace

void test_chain_hash() {
  const struct {
    size_t size;
    const char* digest;
  } known[] = {{0, "cae66941d9efbd404e4d88758ea67670"},
               {3, "a75c0b0d97360c1ba783496eb6a0395a"},
               {128, "a74787004ef589e31149183900d0294a"},
               {300, "a021a719dabbbce707bec49e7a6c9865"}};
  for (const auto& [size, digest] : known) {
    std::vector<uint8_t> data(size);
    for (size_t i = 0; i < size; ++i) data[i] = uint8_t(i % 251);
    check(hex(blake2b(data)) == digest, "the digest of " + std::to_string(size) + " bytes");
  }
  const Digest root = blake2b({});
  const std::vector<int32_t> tokens = {1, -2, 3, 70000, 5, 6, 7};
  const auto chain = chain_hashes(root, tokens, 3);
  std::vector<uint8_t> data(root.begin(), root.end());
  for (int32_t token : {1, -2, 3})
    for (int shift : {0, 8, 16, 24}) data.push_back(uint8_t(uint32_t(token) >> shift));
  check(chain.size() == 2 && chain[0] == blake2b(data), "the first link of a chain");
  check(chain_hashes(root, {}, 3).empty() && chain_hashes(root, tokens, 8).empty(), "a chain without a whole block");
}

}  // namespace penstock::test
