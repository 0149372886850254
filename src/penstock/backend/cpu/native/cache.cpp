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

Cache::Cache(const std::string& type)
    : name_(type),
      keys_(format_of(type.substr(0, type.find(':')))),
      values_(format_of(type.substr(type.find(':') == std::string::npos ? 0 : type.find(':') + 1))) {}

const Cache::Format& Cache::format_of(const std::string& name) {
  static constexpr Format FORMATS[] = {
      {"f16", 16, 0, 0, &Kernels::f16, &Kernels::mla_f16},
      {"f32", 32, 0, 0, &Kernels::f32, &Kernels::mla_f32},
      {"int8", 8, sizeof(float), 0, &Kernels::int8, &Kernels::mla_int8},
      {"int4", 4, sizeof(uint16_t), KV_GROUP, &Kernels::int4, nullptr}};
  for (const Format& format : FORMATS)
    if (name == format.name) return format;
  throw std::invalid_argument("a KV cache stores f16, f32, int8 or int4; got " + name);
}

void Cache::check_shape(const KvShape& shape) const {
  if (shape.v_dim)
    require(keys_.mla && keys_.kernels == values_.kernels, "MLA stores keys and values together, as f16, f32 or int8");
  else
    for (const Format* format : {&keys_, &values_})
      require(!format->group || shape.dim % format->group == 0,
              "4-bit keys and values need heads of a multiple of " + std::to_string(KV_GROUP) + " dimensions; got " +
                  std::to_string(shape.dim));
}

void Cache::add_layer(size_t layer, KvShape shape) {
  if (layer < shapes_.size() && shapes_[layer] == shape) return;
  require(layer == shapes_.size(),
          "layers attend in order: expected " + std::to_string(shapes_.size()) + ", got " + std::to_string(layer));
  check_shape(shape);
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
  std::string text = name_ + ", blocks of " + std::to_string(block_size_) + " positions, " +
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
