#include "cache.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>

#include "require.h"

namespace penstock {

namespace {

constexpr double MAX_BYTES = 0x1p46;  // more than any machine maps

}  // namespace

Cache::Cache(const std::string& type) : type_(type_of(type)) {}

Cache::Type Cache::type_of(const std::string& name) {
  constexpr Type TYPES[] = {
      {"f16", 2, 0, &Kernels::f16, &Kernels::mla_f16},
      {"f32", 4, 0, &Kernels::f32, &Kernels::mla_f32},
      {"int8", 1, KV_SCALES * sizeof(float), &Kernels::int8, &Kernels::mla_int8}};
  for (const Type& type : TYPES)
    if (name == type.name) return type;
  throw std::invalid_argument("a KV cache stores f16, f32 or int8; got " + name);
}

void Cache::add_layer(size_t layer, KvShape shape) {
  if (layer < shapes_.size() && shapes_[layer] == shape) return;
  require(layer == shapes_.size(),
          "layers attend in order: expected " + std::to_string(shapes_.size()) + ", got " + std::to_string(layer));
  shapes_.push_back(shape);
}

size_t Cache::bytes_per_token() const {
  size_t bytes = 0;
  for (const auto& shape : shapes_) bytes += layer_bytes(shape) / TILE;
  return bytes;
}

size_t Cache::block_bytes() const {
  size_t bytes = 0;
  for (const Plane& plane : planes_) bytes += plane.bytes;
  return bytes;
}

std::string Cache::layout() const {
  std::string text = std::string(type_.name) + ", blocks of " + std::to_string(block_size_) + " positions, " +
                     std::to_string(groups_) + " groups of layers with heads x dim x v_dim x index_dim";
  const auto add = [&](const KvShape& shape) {
    text.append(" ").append(std::to_string(shape.heads)).append("x").append(std::to_string(shape.dim)).append("x")
        .append(std::to_string(shape.v_dim)).append("x").append(std::to_string(shape.index_dim));
  };
  const bool same = std::all_of(shapes_.begin(), shapes_.end(), [&](const auto& s) { return s == shapes_[0]; });
  if (same)
    for (size_t plane = 0; plane < planes_.size(); ++plane) add(shapes_[0]);
  else
    for (size_t layer = 0; layer < shapes_.size(); ++layer) {
      add(shapes_[layer]);
      text.append(" in group ").append(std::to_string(group_of_[layer]));
    }
  return text;
}

std::vector<Cache::Place> Cache::places_of(const LayerGroups& groups) const {
  size_t room = 0;
  for (const KvShape& shape : shapes_) room = std::max(room, layer_bytes(shape));
  std::vector<Place> places(shapes_.size());
  std::vector<bool> seen(shapes_.size());
  for (const auto& layers : groups) {
    Place next = {0, 0};
    for (const size_t layer : layers) {
      require(layer < shapes_.size() && !seen[layer], "every layer that keeps KV is in one group, once; got layer " +
                                                          std::to_string(layer) + " of " +
                                                          std::to_string(shapes_.size()));
      seen[layer] = true;
      const size_t bytes = layer_bytes(shapes_[layer]);
      if (next.offset + bytes > room) next = {next.plane + 1, 0};
      places[layer] = next;
      next.offset += bytes;
    }
  }
  for (size_t layer = 0; layer < seen.size(); ++layer)
    require(seen[layer], "layer " + std::to_string(layer) + " is in no group");
  return places;
}

void Cache::reserve(size_t blocks, size_t block_size, const LayerGroups& groups, MemoryFile* file) {
  if (blocks == 0 || block_size == 0 || blocks > INT32_MAX || block_size > INT32_MAX / blocks)
    throw std::invalid_argument("a KV cache needs between 1 and 2^31 positions");
  if (groups.empty()) {
    LayerGroups one(1);
    one[0].resize(shapes_.size());
    std::iota(one[0].begin(), one[0].end(), size_t(0));
    return reserve(blocks, block_size, one, file);
  }
  const std::vector<Place> places = places_of(groups);
  memory_ = Memory();
  blocks_ = 0;
  block_size_ = block_size;
  padded_size_ = (block_size + TILE - 1) / TILE * TILE;
  const size_t tiles = padded_size_ / TILE;
  planes_.clear();
  for (size_t layer = 0; layer < places.size(); ++layer) {
    const Place& place = places[layer];
    if (place.plane >= planes_.size()) planes_.resize(place.plane + 1, Plane{nullptr, 0});
    size_t& bytes = planes_[place.plane].bytes;
    bytes = std::max(bytes, tiles * (place.offset + layer_bytes(shapes_[layer])));
  }
  const double wanted = double(blocks) * double(block_bytes());
  if (wanted > MAX_BYTES) throw std::bad_alloc();
  memory_ = file ? Memory(size_t(wanted), *file) : Memory(size_t(wanted));
  blocks_ = blocks;
  groups_ = groups.size();
  group_of_.assign(shapes_.size(), 0);
  std::byte* next = memory_.as();
  for (Plane& plane : planes_) {
    plane.base = next;
    next += blocks * plane.bytes;
  }
  base_.clear();
  stride_.clear();
  for (const Place& place : places) {
    base_.push_back(planes_[place.plane].base + place.offset * tiles);
    stride_.push_back(planes_[place.plane].bytes);
  }
  for (size_t group = 0; group < groups.size(); ++group)
    for (const size_t layer : groups[group]) group_of_[layer] = group;
}

void Cache::check_blocks(Blocks blocks) const {
  for (int64_t block : blocks)
    require(block >= 0 && size_t(block) < blocks_, "block " + std::to_string(block) + " is outside the KV cache of " +
                                                       std::to_string(blocks_) + " blocks");
}

void Cache::copy(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  for (const auto& [source, target] : pairs) {
    const int64_t both[] = {source, target};
    check_blocks(both);
  }
  for (const auto& [source, target] : pairs)
    for (const auto& [base, bytes] : planes_)
      std::memmove(base + size_t(target) * bytes, base + size_t(source) * bytes, bytes);
}

void Cache::export_blocks(Blocks blocks, std::byte* out) const {
  check_blocks(blocks);
  for (int64_t block : blocks)
    for (const auto& [base, bytes] : planes_) {
      std::memcpy(out, base + size_t(block) * bytes, bytes);
      out += bytes;
    }
}

}  // namespace penstock
