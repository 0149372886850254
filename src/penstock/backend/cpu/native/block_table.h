// Which replicas hold which block, by chain hash: an open-addressing table whose access costs one cache miss, where a
// dictionary of Python objects has four. fleet/holders.py defines it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "chain_hash.h"

namespace penstock {

class BlockTable {
 public:
  BlockTable();

  // Gives a replica's two bits of one block this value; 0 takes the replica from the block's holders.
  void set(size_t replica, const Digest& block, uint64_t bits);

  // All replicas' bits of a block, 64 to a word; empty if nobody holds it.
  std::span<const uint64_t> find(const Digest& block) const;

  // Takes a replica from the holders of every block.
  void clear(size_t replica);

  // The blocks that a replica holds, each with its bits.
  std::vector<std::pair<uint64_t, Digest>> held_by(size_t replica) const;

  size_t size() const { return used_; }

 private:
  static constexpr size_t KEY = 2;  // words of a digest, at the beginning of a slot

  uint64_t* slot(size_t at) { return slots_.data() + at * stride(); }
  const uint64_t* slot(size_t at) const { return slots_.data() + at * stride(); }
  size_t stride() const { return KEY + width_; }
  bool empty(size_t at) const;
  size_t place(const Digest& block) const;
  void remove(size_t at);
  void rebuild(size_t capacity, size_t width);

  std::vector<uint64_t> slots_;
  size_t capacity_;  // a power of two
  size_t width_;     // words of bits in a slot: a slot without any bit is empty
  size_t used_ = 0;
};

}  // namespace penstock
