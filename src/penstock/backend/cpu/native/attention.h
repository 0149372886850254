// Causal attention over the paged cache.
#pragma once

#include "frame.h"

namespace penstock {

struct Attention {
  size_t layer, heads, kv_heads, dim;
  size_t window;     // 0: sees everything before
  int angles;        // buffer [T][cos of each pair, sin of each pair]
  bool interleaved;  // pairs are (2i, 2i + 1) or (i, i + pairs)
  float scale;

  size_t group() const { return heads / kv_heads; }
  size_t width() const { return (heads + 2 * kv_heads) * dim; }
  KvShape shape() const { return {kv_heads, dim}; }
  size_t scratch_floats() const;  // what one worker needs
};

inline constexpr size_t QUERY_TILE = 16;

Phase store_phase(const Attention& attention, int qkv);           // rotates keys and writes them and the values
Phase attend_phase(const Attention& attention, int qkv, int out);  // every token over its sequence

}  // namespace penstock
