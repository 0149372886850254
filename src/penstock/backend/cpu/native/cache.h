// The paged KV cache: blocks of positions, in tiles of 16.
//
// Layers are divided into groups. A block belongs to one group at a time and holds its positions for all layers of that
// group, so that one block table serves a group and one pool of blocks serves all groups. In memory: plane -> block ->
// layer -> KV head -> tile. A plane has room for the largest layer, or for as many smaller ones as fit beside each other,
// and each group fills planes from the first one on.
//
// A tile has two sides, each in a format of its own: keys [dim][16], then values [16][padded dim]. A side of 8 or 4 bits
// begins with its scales. Because keys are transposed, a query is scored against 16 positions without a sum across lanes.
// Keys of 4 bits are stored after a Hadamard transform, which queries get too: it spreads the few large dimensions that
// keys have over all. The values of MLA are a part of its keys: a tile has keys [16][dim], and scales for the rotated
// part and for the values. Where an index selects positions, its keys follow in a side of their own, [index dim][16].
//
// A block whose size is not a multiple of 16 ends in unused places: `place` counts positions with those included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace penstock {

struct KvShape {
  size_t heads, dim;
  size_t v_dim = 0;  // above 0: MLA
  size_t index_dim = 0;  // above 0: positions have an index key

  size_t padded() const { return ((v_dim ? v_dim : dim) + 15) / 16 * 16; }
  size_t mla_values() const { return TILE * dim; }
  bool operator==(const KvShape&) const = default;
};

using LayerGroups = std::vector<std::vector<size_t>>;  // the layers of each group
using Blocks = std::span<const int64_t>;

class Cache {
 public:
  explicit Cache(const std::string& type);  // f32, f16, int8 or int4; or two of them, of keys and values: int8:int4

  void add_layer(size_t layer, KvShape shape);  // layers come in order; one that is there already is used again
  // No groups: all layers are one. No file: its memory is private.
  void reserve(size_t blocks, size_t block_size, const LayerGroups& groups, MemoryFile* file = nullptr);
  void copy(const std::vector<std::pair<int64_t, int64_t>>& pairs);  // (source, target) blocks
  void export_blocks(Blocks blocks, std::byte* out) const;  // writes block_bytes() for each, one after the other
  void check_blocks(Blocks blocks) const;                   // throws if one of them is not there
  // Visits the parts of a block in the order in which export_blocks writes them.
  template <class Visit>
  void visit(int64_t block, Visit visit) const {
    for (const auto& [base, bytes] : planes_) visit(std::span(base + size_t(block) * bytes, bytes));
  }

  size_t layers() const { return shapes_.size(); }
  size_t groups() const { return groups_; }
  size_t group(size_t layer) const { return group_of_[layer]; }
  size_t bytes_per_token() const;  // in all layers
  size_t block_bytes() const;      // in the layers of one group
  std::string layout() const;      // two caches with equal layouts can exchange blocks
  bool same_layers(const Cache& other) const { return name_ == other.name_ && shapes_ == other.shapes_; }
  size_t blocks() const { return blocks_; }
  size_t block_size() const { return block_size_; }
  size_t place(size_t position) const { return position / block_size_ * padded_size_ + position % block_size_; }
  size_t position(size_t place) const { return place / padded_size_ * block_size_ + place % padded_size_; }
  bool unused(size_t place) const { return place % padded_size_ >= block_size_; }
  bool has_unused() const { return padded_size_ != block_size_; }
  const KvKernels& key_kernels(const Kernels& all) const { return all.*keys_.kernels; }
  const KvKernels& value_kernels(const Kernels& all) const { return all.*values_.kernels; }
  const MlaKernels& mla_kernels(const Kernels& all) const { return all.*keys_.mla; }
  bool transforms_keys() const { return keys_.group; }

  // The tile that holds `place` of a sequence with this block table.
  std::byte* tile(size_t layer, size_t head, const int32_t* table, size_t place) const {
    const KvShape& shape = shapes_[layer];
    const size_t tiles = padded_size_ / TILE;
    const size_t block = size_t(table[place / padded_size_]);
    const size_t index = head * tiles + place % padded_size_ / TILE;
    return base_[layer] + block * stride_[layer] + index * tile_bytes(shape);
  }

  size_t key_bytes(const KvShape& shape) const { return keys_.side_bytes(shape.dim); }  // values follow after these
  size_t kv_tile_bytes(const KvShape& shape) const {  // without index keys
    if (shape.v_dim) return 2 * TILE * keys_.scale_bytes + shape.mla_values() * keys_.bits / 8;
    return key_bytes(shape) + values_.side_bytes(shape.padded());
  }
  size_t index_bytes(size_t index_dim) const { return index_dim ? keys_.side_bytes(index_dim) : 0; }

  // The tile of index keys for the tile with `place`.
  std::byte* index_tile(size_t layer, const int32_t* table, size_t place) const {
    return tile(layer, 0, table, place) + kv_tile_bytes(shapes_[layer]);
  }

 private:
  struct Format {
    const char* name;
    size_t bits, scale_bytes;  // per value, per scale
    size_t group;              // dimensions that have a scale together; 0: all of a head
    KvKernels Kernels::* kernels;
    MlaKernels Kernels::* mla;

    size_t side_bytes(size_t dim) const {
      return TILE * (dim * bits / 8 + scale_bytes * (group ? dim / group : 1));
    }
  };
  // Where a layer lies within each block.
  struct Place {
    size_t plane;
    size_t offset;  // bytes for each tile of the block
  };
  static const Format& format_of(const std::string& name);
  void check_shape(const KvShape& shape) const;  // throws for a shape that a format cannot store

  std::vector<Place> places_of(const LayerGroups& groups) const;
  size_t tile_bytes(const KvShape& shape) const { return kv_tile_bytes(shape) + index_bytes(shape.index_dim); }
  size_t layer_bytes(const KvShape& shape) const { return shape.heads * tile_bytes(shape); }  // 16 positions

  std::string name_;
  Format keys_, values_;
  std::vector<KvShape> shapes_;   // index: layer
  std::vector<size_t> group_of_;  // index: layer
  std::vector<std::byte*> base_;  // index: layer; its place in the first block
  std::vector<size_t> stride_;    // index: layer; bytes from block to block
  struct Plane {
    std::byte* base;
    size_t bytes;  // per block
  };
  std::vector<Plane> planes_;
  size_t groups_ = 1, blocks_ = 0, block_size_ = 1, padded_size_ = TILE;
  Memory memory_;
};

}  // namespace penstock
