// Attention over the paged cache.
#pragma once

#include "frame.h"

namespace penstock {

struct Attention {
  size_t layer, heads, kv_heads, dim;
  size_t window;     // 0: sees everything before
  int angles;        // buffer [T][cos of each pair, sin of each pair]; -1: nothing is turned
  bool interleaved;  // pairs are (2i, 2i + 1) or (i, i + pairs)
  float scale;
  float soft_cap;  // of scores; 0: none
  bool causal;     // else a token sees its whole row
  std::vector<float> sinks = {};  // of each head: a score that gives nothing; or none

  size_t group() const { return heads / kv_heads; }
  size_t width() const { return (heads + 2 * kv_heads) * dim; }
  KvShape shape() const { return {kv_heads, dim}; }
  size_t scratch_floats() const;  // what one worker needs
  size_t state_floats() const;    // what a tile of queries has gathered
};

inline constexpr size_t QUERY_TILE = 16;

// Positions over which one softmax runs on; those of several parts are joined in order. Parts stand at fixed places of
// a sequence, so the result is the same however they are shared out.
inline constexpr size_t PART = 4 * SPAN;

void plan_attention(Frame& frame, bool causal);  // the step's tiles and pieces

Phase store_phase(const Attention& attention, int qkv);           // rotates keys and writes them and the values
Phase attend_phase(const Attention& attention, int qkv, int out);  // every piece
Phase join_phase(const Attention& attention, int out);             // tiles that were cut into pieces

}  // namespace penstock
