// Mamba2: heads that keep what they have seen in a state which decays by one number for each token.
#pragma once

#include <memory>

#include "conv.h"
#include "frame.h"

namespace penstock {

struct Mamba2Shape {
  size_t layer, heads, head_dim, state_dim;
  size_t groups;  // neighbouring heads that share B and C
  size_t conv_width;

  size_t inner() const { return heads * head_dim; }
  size_t width() const { return inner() + 2 * groups * state_dim; }  // the convolution's input: x, B and C
  size_t in_width() const { return inner() + width() + heads; }      // z, x, B, C and dt
  size_t memory_floats() const { return state_dim * head_dim; }
  // A state: the memory of each head [state_dim][head_dim], then the last inputs [conv_width - 1][width].
  size_t state_floats() const { return heads * memory_floats() + conv().kept_floats(); }
  ConvShape conv() const { return {layer, width(), conv_width, heads * memory_floats(), inner()}; }
  size_t scratch_floats() const;  // what one worker needs
};

struct Mamba2Vectors {
  std::vector<float> decay, dt_bias, skip;  // [heads]
  std::vector<float> gain;                  // [inner]; empty: no norm
  size_t norm_groups;                       // parts of a row that are normed on their own
  float eps, z_scale, dt_scale, dt_min, dt_max;
};

// Each head of each row, and what the row convolved last. `mixed` is silu of x, B and C convolved.
Phase selective_scan_phase(const Mamba2Shape& shape, std::shared_ptr<const Mamba2Vectors> vectors, int zxbcdt, int mixed,
                           int out);
// out = rms_norm(out * silu(z)) * gain for one token, in place.
void gate_and_norm(const Frame& frame, const Mamba2Shape& shape, const Mamba2Vectors& vectors, int zxbcdt, int out,
                   size_t token);

}  // namespace penstock
