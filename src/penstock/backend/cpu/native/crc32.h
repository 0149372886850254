// The CRC-32 of zlib, several times faster where the CPU has instructions for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace penstock {

// Whether this CPU has such instructions; without them zlib is the faster one.
bool has_fast_crc32();

// zlib.crc32(data, start)
uint32_t crc32(std::span<const std::byte> data, uint32_t start = 0);

}  // namespace penstock
