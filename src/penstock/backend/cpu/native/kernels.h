// The inner loops, as a table of functions that each ISA fills in its own translation unit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.h"
#include "trellis.h"

namespace penstock {

inline constexpr size_t TILE = 16;    // positions whose keys are computed with at once
inline constexpr size_t SPAN = 128;   // positions over which one softmax step runs

inline constexpr size_t BAND = 96;  // rows of one product at most

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
  Grouping grouping;    // read by kinds of formats with GROUPED scales
  bool add = false;     // to y; for F32 and F16 without a bias
};

struct Rotation {
  const float* cos;  // [pairs]
  const float* sin;  // [pairs]
  size_t pairs;
  bool interleaved;
};

inline constexpr size_t KV_SCALES = 2 * TILE;  // floats before an 8-bit tile of MLA: what its values are multiples of
inline constexpr size_t KV_GROUP = 32;         // dimensions of a head with one scale, of 4-bit keys and values

// Sides of a tile of cache.h: the keys of one head and 16 positions, or their values.
struct KvKernels {
  void (*store_key)(const float* key, size_t dim, size_t lane, void* side);
  // scores[q][0..16] = queries[q] . keys; rows of scores are SPAN apart. The tile `soon` is asked for meanwhile.
  void (*score)(const float* queries, size_t count, size_t dim, const void* side, const void* soon, size_t soon_bytes,
                float* scores);
  void (*store_value)(const float* value, size_t dim, size_t padded, size_t lane, void* side);
  // out[q] += sum over the first n positions of weights[q][j] * values[j]
  void (*mix)(const float* weights, size_t count, const void* side, size_t n, size_t padded, float* out);
};

using Activation = void (*)(const float* x, size_t n, float* out);
// KV of MLA, a tile of 16 positions. The last v_dim dimensions of keys are their values. v_dim and what comes before it
// are padded to multiples of 16.
struct MlaKernels {
  void (*store)(const float* key, size_t dim, size_t v_dim, size_t lane, void* tile);
  void (*score)(const float* queries, size_t count, size_t dim, size_t v_dim, const void* tile, float* scores);
  void (*mix)(const float* weights, size_t count, const void* tile, size_t n, size_t dim, size_t v_dim, float* out);
  void (*copy)(const void* from, size_t from_lane, size_t dim, void* to, size_t to_lane);  // one position
};

inline constexpr size_t MAX_CONV_WIDTH = 16;
inline constexpr size_t MAX_COLUMNS = 64;  // columns of a delta net's memory that go through tokens together

// The delta rule for one head: for each token in order, its memory decays, learns the value under the key, and is read.
struct DeltaRule {
  const float *q, *k, *faded;  // [count][k_dim]; `faded` is k times the decay
  const float* v;              // rows are v_stride apart
  const float *decay, *beta;   // [count], and decay [count][k_dim] with `channels`
  bool channels;               // each row of the memory has a decay of its own
  size_t k_dim, v_dim, v_stride, count;
  float* memory;               // [k_dim][v_dim]
  float* columns;              // [k_dim][MAX_COLUMNS] room for some columns of the memory
  float* out;                  // rows are out_stride apart
  size_t out_stride;
};

// out = bias + the sum over conv_width positions of seen[i] * taps[i], or silu of that, for each of `width` channels.
struct Convolution {
  const float* const* seen;  // [conv_width] inputs; one that is null adds nothing
  const float* taps;         // [conv_width][width]
  const float* bias;         // [width], or null
  size_t conv_width, width;
  bool silu;
  float* out;
};

struct DeltaKernels {
  void (*convolve)(const Convolution&);
  void (*delta_rule)(const DeltaRule&);
  void (*gate_by)(const float* x, const float* gate, size_t width, float* out);  // x * sigmoid(gate)
  // out = e^(rate * softplus(x + bias))
  void (*decay)(const float* x, const float* bias, float rate, size_t width, float* out);
  void (*unit)(const float* x, size_t width, float factor, float* out);  // x * factor / |x|
  // out = k * decay, which is one number, or with `channels` one for each value
  void (*fade)(const float* k, const float* decay, bool channels, size_t width, float* out);
};

// Parts of rows, and streams that are parts of rows.
struct StreamKernels {
  void (*add_scaled)(const float* x, size_t n, float factor, float* out);  // out += x * factor
  float (*mean_square)(const float* x, size_t n);
  // out = max(x - c, 0), where c lies `deviations` standard deviations above the mean
  void (*cut_off)(const float* x, size_t n, float deviations, float* out);
};

// The selective scan of Mamba for some channels: for each token in order, the state of each channel decays, takes in b
// times the input, and is read by c. What is read, and the input times skip, are multiplied by silu(gate).
struct ChannelScan {
  const float *x, *dt;  // rows are `stride` apart
  const float* gate;    // rows are gate_stride apart
  size_t gate_stride;
  const float *b, *c;  // [count][state_size]
  const float* decay;  // [state_size][channels]
  const float* skip;   // [channels]
  size_t stride, channels, state_size, count;
  float* state;  // [state_size][channels]
  float* out;    // rows are `stride` apart
};

struct MambaKernels {
  void (*scan)(const ChannelScan&);
  void (*multiply)(const float* x, const float* y, size_t width, float* out);
};

// The selective scan of Mamba2 for one head: for each token in order, its memory decays, takes in the outer product of B
// and x * dt, and is read by C. To what is read x * skip is added.
struct SelectiveScan {
  const float *x, *b, *c;  // rows are `stride` apart
  size_t stride;
  const float *dt, *decay;  // [count]
  float skip;
  size_t state_dim, head_dim, count;
  float* memory;  // [state_dim][head_dim]
  float* out;     // rows are out_stride apart
  size_t out_stride;
};

struct Mamba2Kernels {
  void (*scan)(const SelectiveScan&);
  void (*gate)(const float* x, const float* z, float scale, size_t width, float* out);  // x * silu(z * scale)
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
  KvKernels f16, f32, int8, int4;
  // Multiplies each run of x by a Hadamard matrix, divided by its norm: a run is the largest power of two that divides
  // dim. It changes no product of two vectors to which both it is done.
  void (*hadamard)(float* x, size_t dim);
  // total = x (+ residual); out = (total - its mean) / its deviation * gain + bias
  void (*add_layer_norm)(const float* x, const float* residual, const float* gain, const float* bias, float eps,
                         size_t width, float* total, float* out);
  Activation silu, gelu, gelu_tanh, relu;
  MlaKernels mla_f16, mla_f32, mla_int8;
  DeltaKernels delta;
  MambaKernels mamba;
  Mamba2Kernels mamba2;
  Activation relu2;  // the square of relu
  // out[i] = sum over heads of weights[head] * relu(scores[head][i]); rows of scores are SPAN apart, n is whole tiles
  void (*index_scores)(const float* scores, const float* weights, size_t heads, size_t n, float* out);
  StreamKernels streams;
  TrellisKernels trellis;
};

}  // namespace penstock
