#include "chain_hash.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "require.h"

namespace penstock {

namespace {

constexpr size_t BLOCK_BYTES = 128;  // input compressed at once
constexpr size_t ROUNDS = 12;

constexpr uint64_t INITIAL[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                 0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr uint8_t ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x;
  d = std::rotr(d ^ a, 32);
  c += d;
  b = std::rotr(b ^ c, 24);
  a += b + y;
  d = std::rotr(d ^ a, 16);
  c += d;
  b = std::rotr(b ^ c, 63);
}

template <size_t Round>
inline void round(uint64_t (&v)[16], const uint64_t (&m)[16]) {
  constexpr const uint8_t(&order)[16] = ORDER[Round % 10];
  mix(v[0], v[4], v[8], v[12], m[order[0]], m[order[1]]);
  mix(v[1], v[5], v[9], v[13], m[order[2]], m[order[3]]);
  mix(v[2], v[6], v[10], v[14], m[order[4]], m[order[5]]);
  mix(v[3], v[7], v[11], v[15], m[order[6]], m[order[7]]);
  mix(v[0], v[5], v[10], v[15], m[order[8]], m[order[9]]);
  mix(v[1], v[6], v[11], v[12], m[order[10]], m[order[11]]);
  mix(v[2], v[7], v[8], v[13], m[order[12]], m[order[13]]);
  mix(v[3], v[4], v[9], v[14], m[order[14]], m[order[15]]);
}

// Takes one input block into the state; `count` bytes have come so far, this block's included.
void compress(uint64_t (&state)[8], const uint8_t* block, uint64_t count, bool last) {
  uint64_t m[16], v[16];
  std::memcpy(m, block, BLOCK_BYTES);
  for (size_t i = 0; i < 8; ++i) {
    v[i] = state[i];
    v[i + 8] = INITIAL[i];
  }
  v[12] ^= count;
  if (last) v[14] = ~v[14];
  const auto all = [&]<size_t... Round>(std::index_sequence<Round...>) { (round<Round>(v, m), ...); };
  all(std::make_index_sequence<ROUNDS>());
  for (size_t i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

Digest blake2b(std::span<const uint8_t> data) {
  constexpr uint64_t PARAMETERS = 0x01010000 | sizeof(Digest);  // no key, one leaf, one level
  uint64_t state[8];
  std::copy(std::begin(INITIAL), std::end(INITIAL), state);
  state[0] ^= PARAMETERS;
  size_t at = 0;
  for (; data.size() - at > BLOCK_BYTES; at += BLOCK_BYTES) compress(state, data.data() + at, at + BLOCK_BYTES, false);
  uint8_t rest[BLOCK_BYTES] = {};
  std::copy(data.begin() + ptrdiff_t(at), data.end(), rest);
  compress(state, rest, data.size(), true);
  Digest digest;
  std::memcpy(digest.data(), state, digest.size());
  return digest;
}

std::vector<Digest> chain_hashes(std::span<const uint8_t> parent, std::span<const int32_t> tokens, size_t block_size) {
  require(parent.size() == sizeof(Digest), "a parent is a digest of 16 bytes; got " + std::to_string(parent.size()));
  require(block_size >= 1, "a block has at least one token");
  std::vector<Digest> digests;
  digests.reserve(tokens.size() / block_size);
  std::vector<uint8_t> data(parent.begin(), parent.end());
  data.resize(sizeof(Digest) + std::min(block_size, tokens.size()) * sizeof(int32_t));
  for (size_t at = 0; tokens.size() - at >= block_size; at += block_size) {
    std::memcpy(data.data() + sizeof(Digest), tokens.data() + at, block_size * sizeof(int32_t));
    digests.push_back(blake2b(data));
    std::memcpy(data.data(), digests.back().data(), sizeof(Digest));
  }
  return digests;
}

}  // namespace penstock
