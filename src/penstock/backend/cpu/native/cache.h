// The paged KV cache: blocks of positions, in tiles of 16.
//
// layer -> block -> KV head -> tile: keys [dim][16], then values [16][padded dim]; before 8-bit ones the scales of the 16
// keys and of the 16 values. With keys turned this way a query is scored against 16 positions without a sum across lanes.
// Of latent attention, whose values are a part of its keys: keys [16][dim], scales of what they begin with and of values.
// A block whose size is not a multiple of 16 ends in unused places: `place` counts positions with those left in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace penstock {

struct KvShape {
  size_t heads, dim;
  size_t v_dim = 0;  // of latent attention

  size_t padded() const { return ((v_dim ? v_dim : dim) + 15) / 16 * 16; }
  size_t tile_values() const { return TILE * (v_dim ? dim : dim + padded()); }
  bool operator==(const KvShape&) const = default;
};

class Cache {
 public:
  explicit Cache(const std::string& type);  // f32, f16 or int8

  void add_layer(size_t layer, KvShape shape);  // layers come in order; one that is there already is used again
  void reserve(size_t blocks, size_t block_size);
  void copy(const std::vector<std::pair<int64_t, int64_t>>& pairs);  // (source, target) blocks

  size_t layers() const { return shapes_.size(); }
  size_t bytes_per_token() const;
  size_t blocks() const { return blocks_; }
  size_t block_size() const { return block_size_; }
  size_t place(size_t position) const { return position / block_size_ * padded_size_ + position % block_size_; }
  bool unused(size_t place) const { return place % padded_size_ >= block_size_; }
  bool has_unused() const { return padded_size_ != block_size_; }
  const KvKernels& kernels(const Kernels& all) const { return all.*type_.kernels; }
  const LatentKernels& latent_kernels(const Kernels& all) const { return all.*type_.latent; }

  // The tile that holds `place` of a sequence with this block table.
  std::byte* tile(size_t layer, size_t head, const int32_t* table, size_t place) const {
    const KvShape& shape = shapes_[layer];
    const size_t tiles = padded_size_ / TILE;
    const size_t block = size_t(table[place / padded_size_]);
    const size_t index = (block * shape.heads + head) * tiles + place % padded_size_ / TILE;
    return base_[layer] + index * tile_bytes(shape);
  }

 private:
  struct Type {
    const char* name;
    size_t value_bytes, scale_bytes;  // of a tile
    KvKernels Kernels::* kernels;
    LatentKernels Kernels::* latent;
  };
  static Type type_of(const std::string& name);

  size_t tile_bytes(const KvShape& shape) const {
    return type_.scale_bytes + shape.tile_values() * type_.value_bytes;
  }
  size_t block_bytes(const KvShape& shape) const { return shape.heads * (padded_size_ / TILE) * tile_bytes(shape); }

  Type type_;
  std::vector<KvShape> shapes_;
  std::vector<std::byte*> base_;  // of each layer
  size_t blocks_ = 0, block_size_ = 1, padded_size_ = TILE;
  Memory memory_;
};

}  // namespace penstock
