// Gated delta nets: sequences whose layers gather what they have seen in a state of one size.
#pragma once

#include <memory>

#include "conv.h"
#include "frame.h"

namespace penstock {

struct DeltaShape {
  size_t layer, k_heads, v_heads, k_dim, v_dim, conv_width;
  bool tiled;          // value head h has key head h % k_heads; else neighbours share one
  bool channel_decay;  // each row of a head's memory decays by a gate of its own; else all by one
  bool sigmoid_gate;   // the output is gated by sigmoid(z); else by silu(z)

  size_t k_width() const { return k_heads * k_dim; }
  size_t v_width() const { return v_heads * v_dim; }
  size_t width() const { return 2 * k_width() + v_width(); }  // the convolution's input: q, k and v
  size_t memory_floats() const { return k_dim * v_dim; }
  size_t decays() const { return channel_decay ? k_dim : 1; }  // per value head
  // A state: the memory of each value head [k_dim][v_dim], then the last inputs [conv_width - 1][width].
  size_t state_floats() const { return v_heads * memory_floats() + (conv_width - 1) * width(); }
  ConvShape conv() const { return {layer, width(), conv_width, v_heads * memory_floats()}; }  // q, k and v
  size_t key_head(size_t v_head) const { return tiled ? v_head % k_heads : v_head / (v_heads / k_heads); }
  size_t scratch_floats() const;  // what one worker needs
};

struct DeltaVectors {
  std::vector<float> decay;  // [v_heads]
  std::vector<float> dt;     // [v_heads][decays]
  std::vector<float> gain;   // [v_dim]
  float eps;
};

// Neighbouring columns of a buffer.
struct Columns {
  int buffer;
  size_t first;

  const float* row(const Frame& frame, size_t token) const { return frame.buffers[size_t(buffer)].row(token) + first; }
};

struct DeltaBuffers {
  int qkv, z, beta, alpha;
};

// What products made of each token: q, k and v, which are the first columns of a buffer; the gate of the output; and for
// each value head how much it learns and how fast it forgets.
struct DeltaInputs {
  int qkv;
  Columns z, beta, alpha;
};

// Each value head of each row, and what the row convolved last. `mixed` is silu of q, k and v convolved.
Phase delta_rule_phase(const DeltaShape& shape, std::shared_ptr<const DeltaVectors> vectors, const DeltaInputs& inputs,
                       int mixed, int out);

}  // namespace penstock
