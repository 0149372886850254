#include "cache.h"

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace penstock {

namespace {

constexpr double MOST_BYTES = 0x1p46;  // more than any machine maps

}  // namespace

Cache::Cache(const std::string& type) : type_(type_of(type)) {}

Cache::Type Cache::type_of(const std::string& name) {
  constexpr Type TYPES[] = {
      {"f16", 2, 0, &Kernels::f16, &Kernels::latent_f16},
      {"f32", 4, 0, &Kernels::f32, &Kernels::latent_f32},
      {"int8", 1, KV_SCALES * sizeof(float), &Kernels::int8, &Kernels::latent_int8}};
  for (const Type& type : TYPES)
    if (name == type.name) return type;
  throw std::invalid_argument("a KV cache holds f16, f32 or int8; got " + name);
}

void Cache::add_layer(size_t layer, KvShape shape) {
  if (layer < shapes_.size() && shapes_[layer] == shape) return;
  if (layer != shapes_.size())
    throw std::invalid_argument("layers attend in order: expected " + std::to_string(shapes_.size()) + ", got " +
                                std::to_string(layer));
  shapes_.push_back(shape);
}

size_t Cache::bytes_per_token() const {
  size_t bytes = 0;
  for (const auto& shape : shapes_) bytes += shape.heads * tile_bytes(shape) / TILE;
  return bytes;
}

void Cache::reserve(size_t blocks, size_t block_size) {
  if (blocks == 0 || block_size == 0 || blocks > INT32_MAX || block_size > INT32_MAX / blocks)
    throw std::invalid_argument("a KV cache needs between 1 and 2^31 positions");
  memory_ = Memory();
  base_.clear();
  blocks_ = 0;
  block_size_ = block_size;
  padded_size_ = (block_size + TILE - 1) / TILE * TILE;
  const double wanted = double(blocks) * double(padded_size_) * double(bytes_per_token());
  if (wanted > MOST_BYTES) throw std::bad_alloc();
  memory_ = Memory(size_t(wanted));
  blocks_ = blocks;
  std::byte* next = memory_.as();
  for (const auto& shape : shapes_) {
    base_.push_back(next);
    next += blocks * block_bytes(shape);
  }
}

void Cache::copy(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  for (const auto& [source, target] : pairs)
    if (source < 0 || target < 0 || size_t(source) >= blocks_ || size_t(target) >= blocks_)
      throw std::invalid_argument("block outside the KV cache of " + std::to_string(blocks_) + " blocks");
  for (const auto& [source, target] : pairs)
    for (size_t layer = 0; layer < shapes_.size(); ++layer) {
      const size_t bytes = block_bytes(shapes_[layer]);
      std::memmove(base_[layer] + size_t(target) * bytes, base_[layer] + size_t(source) * bytes, bytes);
    }
}

}  // namespace penstock
