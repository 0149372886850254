// The inner loops, as a table of functions that each ISA fills in its own translation unit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace penstock {

inline constexpr size_t TILE = 16;    // positions whose keys are computed with at once
inline constexpr size_t SPAN = 128;   // positions over which one softmax step runs

inline constexpr size_t BAND = 96;  // rows for which panels are made ready at once

// y[r][0..columns] = x[r] . each row of consecutive packed panels (+ bias), for up to BAND rows r of x.
// Given partners (of quantized formats, without bias): silu(x[r] . row of the panels) * (x[r] . row of the partners).
struct PanelProduct {
  const std::byte* panels;
  const std::byte* partners;  // or null
  size_t panel_bytes;
  size_t width;
  const std::byte* x;  // [rows] of floats, of CodeBlocks for quantized formats, or of BF16 (see to_bfloats)
  size_t x_stride;     // bytes from row to row
  size_t rows;
  bool middles;  // whether blocks of x have any
  const float* bias;  // [columns], or null
  float* y;
  size_t y_stride;  // floats from row to row
  size_t columns;
  const int8_t* table;  // of 16 numbers that codes stand for, and what all of them are multiplied with;
  float factor;         // read by kinds of formats that have a table
};

struct Rotation {
  const float* cos;  // [pairs]
  const float* sin;  // [pairs]
  size_t pairs;
  bool interleaved;
};

inline constexpr size_t KV_SCALES = 2 * TILE;  // floats before 8-bit keys and values: what they are multiples of

// KV of one head and 16 positions, a tile of cache.h.
struct KvKernels {
  void (*store)(const float* key, const float* value, size_t dim, size_t padded, size_t lane, void* tile);
  // scores[q][0..16] = queries[q] . keys; rows of scores are SPAN apart. The keys of `soon` are asked for meanwhile.
  void (*score)(const float* queries, size_t count, size_t dim, const void* tile, const void* soon, float* scores);
  // out[q] += sum over the first n positions of weights[q][j] * values[j]
  void (*mix)(const float* weights, size_t count, const void* tile, size_t n, size_t dim, size_t padded, float* out);
};

using Activation = void (*)(const float* x, size_t n, float* out);
// KV of MLA, a tile of 16 positions: dimensions are multiples of 16, and the last v_dim of keys are their values.
struct MlaKernels {
  void (*store)(const float* key, size_t dim, size_t v_dim, size_t lane, void* tile);
  void (*score)(const float* queries, size_t count, size_t dim, size_t v_dim, const void* tile, float* scores);
  void (*mix)(const float* weights, size_t count, const void* tile, size_t n, size_t dim, size_t v_dim, float* out);
};

inline constexpr size_t MAX_CONV_WIDTH = 16;

// The delta rule for one head: for each token in order, its memory decays, learns the value under the key, and is read.
struct DeltaRule {
  const float *q, *k;          // [count][k_dim]
  const float* v;              // rows are v_stride apart
  const float *decay, *beta;   // [count]
  size_t k_dim, v_dim, v_stride, count;
  float* memory;               // [k_dim][v_dim]
  float* out;                  // rows are out_stride apart
  size_t out_stride;
};

struct DeltaKernels {
  // out = silu of the sum over conv_width positions of seen[i] * weights[i]; one that is null adds nothing
  void (*convolve)(const float* const* seen, const float* weights, size_t conv_width, size_t width, float* out);
  void (*delta_rule)(const DeltaRule&);
  void (*gate_by)(const float* x, const float* gate, size_t width, float* out);  // x * sigmoid(gate)
};

// Parts of rows, and streams that are parts of rows.
struct StreamKernels {
  void (*multiply)(const float* x, const float* y, size_t n, float* out);
  void (*add_scaled)(const float* x, size_t n, float factor, float* out);  // out += x * factor
  float (*mean_square)(const float* x, size_t n);
  // out = max(x - c, 0), where c lies so many standard deviations above the mean
  void (*cut_off)(const float* x, size_t n, float deviations, float* out);
};

struct Kernels {
  void (*product[FORMATS])(const PanelProduct&);
  // Where products with BF16 weights take rows of BF16: makes such a row, of whole blocks. Else null.
  void (*to_bfloats)(const float* x, size_t width, uint16_t* out);
  // With middles codes are spent on the range that a block has, without on one around zero.
  void (*quantize)(const float* x, size_t width, bool middles, CodeBlock* out);
  // total = x (+ residual); out = total / rms(total) * gain
  void (*add_norm)(const float* x, const float* residual, const float* gain, float eps, size_t width, float* total,
                   float* out);
  void (*gate)(const float* x, size_t hidden, float* out);       // silu(x[:hidden]) * x[hidden:]
  void (*gelu_gate)(const float* x, size_t hidden, float* out);  // the same with gelu
  void (*gelu_tanh_gate)(const float* x, size_t hidden, float* out);  // and as tanh approximates it
  // min(x[:hidden], 7) * sigmoid(1.702 * that) * (1 + x[hidden:], between -7 and 7)
  void (*clamped_gate)(const float* x, size_t hidden, float* out);
  void (*rotate)(const float* x, size_t dim, const Rotation& rotation, float scale, float* out);
  // One step of a running softmax over n scores, which become weights; `out` [padded] is rescaled to the new maximum.
  void (*soften)(float* scores, size_t n, float& maximum, float& sum, size_t padded, float* out);
  void (*scale)(float* x, size_t n, float factor);
  void (*soft_cap)(float* x, size_t n, float cap);  // cap * tanh(x / cap)
  float (*highest)(const float* x, size_t n);
  // weights = e^((x - highest) / temperature), in the very steps that backend/sample.py defines
  void (*weigh)(const float* x, size_t n, float temperature, float highest, float* weights);
  KvKernels f16, f32, int8;
  // total = x (+ residual); out = (total - its mean) / its deviation * gain + bias
  void (*add_layer_norm)(const float* x, const float* residual, const float* gain, const float* bias, float eps,
                         size_t width, float* total, float* out);
  Activation silu, gelu, gelu_tanh, relu;
  MlaKernels mla_f16, mla_f32, mla_int8;
  DeltaKernels delta;
  StreamKernels streams;
};

}  // namespace penstock
