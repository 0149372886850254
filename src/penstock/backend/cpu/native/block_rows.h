// Copies blocks to and from rows of memory, and computes the CRC of what has arrived while it is still in the
// processor's cache: in the row if a block is copied out, in the block if it is copied in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "crc32.h"
#include "pool.h"

namespace penstock {

enum class Way { OUT, IN };

// Where each of some blocks begins in its row, and the CRC of what comes before it there, to be continued; without
// CRCs, none are computed.
struct BlockRows {
  std::vector<std::byte*> begin;
  std::vector<uint32_t> crcs;
};

// A chunk is a block of a `Stored`, which visits the parts of a block in order.
template <class Stored>
class RowJob final : public Job {
 public:
  RowJob(const Stored& stored, std::span<const int64_t> blocks, BlockRows& rows, Way way)
      : stored_(stored), blocks_(blocks), rows_(rows), way_(way) {}
  size_t phases() const override { return 1; }
  uint32_t chunks(size_t) const override { return uint32_t(blocks_.size()); }
  void run(size_t, uint32_t chunk, unsigned) const noexcept override {
    std::byte* row = rows_.begin[chunk];
    const bool checked = !rows_.crcs.empty();
    uint32_t crc = checked ? rows_.crcs[chunk] : 0;
    stored_.visit(blocks_[chunk], [&](std::span<std::byte> part) {
      std::byte* const to = way_ == Way::OUT ? row : part.data();
      std::memcpy(to, way_ == Way::OUT ? part.data() : row, part.size());
      if (checked) crc = crc32({to, part.size()}, crc);
      row += part.size();
    });
    if (checked) rows_.crcs[chunk] = crc;
  }

 private:
  const Stored& stored_;
  std::span<const int64_t> blocks_;
  BlockRows& rows_;
  Way way_;
};

}  // namespace penstock
