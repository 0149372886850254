// Chain hashes of token blocks: one digest stands for a block of tokens and everything before it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace penstock {

using Digest = std::array<uint8_t, 16>;

// BLAKE2b (RFC 7693) without a key, with digests of 16 bytes: hashlib.blake2b(data, digest_size=16).
Digest blake2b(std::span<const uint8_t> data);

// The digests of all whole blocks of tokens: of each block's parent digest, followed by its tokens as little-endian
// int32. The first block's parent is given.
std::vector<Digest> chain_hashes(std::span<const uint8_t> parent, std::span<const int32_t> tokens, size_t block_size);

}  // namespace penstock
