// Gated delta nets: sequences whose layers gather what they have seen in a state of one size.
#pragma once

#include <memory>

#include "conv.h"
#include "frame.h"

namespace penstock {

struct DeltaShape {
  size_t layer, k_heads, v_heads, k_dim, v_dim, conv_width;
  bool tiled;  // value head h has key head h % k_heads; else neighbours share one

  size_t k_width() const { return k_heads * k_dim; }
  size_t v_width() const { return v_heads * v_dim; }
  size_t width() const { return 2 * k_width() + v_width(); }  // of what is convolved: q, k and v
  size_t memory_floats() const { return k_dim * v_dim; }
  // A state: the memory of each value head [k_dim][v_dim], then what was convolved last [conv_width - 1][width].
  size_t state_floats() const { return v_heads * memory_floats() + (conv_width - 1) * width(); }
  ConvShape conv() const { return {layer, width(), conv_width, v_heads * memory_floats()}; }  // of q, k and v
  size_t key_head(size_t v_head) const { return tiled ? v_head % k_heads : v_head / (v_heads / k_heads); }
  size_t scratch_floats() const;  // what one worker needs
};

struct DeltaVectors {
  std::vector<float> decay, dt;  // [v_heads]
  std::vector<float> gain;       // [v_dim]
  float eps;
};

// Each value head of each row, and what the row convolved last. `mixed` is silu of q, k and v convolved.
Phase delta_rule_phase(const DeltaShape& shape, std::shared_ptr<const DeltaVectors> vectors, int qkvz, int mixed, int ba,
                     int out);

}  // namespace penstock
