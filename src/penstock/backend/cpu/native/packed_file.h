// Reads packed weights from a file into their memory, and computes the checksum that guards them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "weights.h"

namespace penstock {

constexpr size_t PIECE_BYTES = size_t(1) << 18;  // read at once, and still in a core's cache when summed

// 64 bits that differ if any one word of the bytes does. It does not protect against forgery.
uint64_t checksum(std::span<const std::byte> bytes);

// Fills the weights, which lie in the file one after the other from `offset` on. Returns false, with all of them
// zeroed, if the file is too short or the checksum of the checksums of all pieces is not `expected`.
bool read_packed(int file, uint64_t offset, const std::vector<Weight*>& weights, uint64_t expected, unsigned threads);

}  // namespace penstock
