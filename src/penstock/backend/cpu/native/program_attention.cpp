// The part of Program that attends, and the products of single heads that MLA has around it.
#include <algorithm>
#include <utility>

#include "linear.h"
#include "program.h"
#include "require.h"

namespace penstock {

void Program::attend(int qkv, const Attention& attention, int out) {
  const auto& a = attention;
  require(a.heads >= 1 && a.kv_heads >= 1 && a.heads <= 65536 && a.heads % a.kv_heads == 0,
          "attention needs a multiple of its KV heads as heads");
  require(a.dim >= 2 && a.dim <= 65536 && a.dim % 2 == 0, "a head needs an even number of values");
  require(qkv != out, "attention cannot write to a buffer that it reads");
  at(qkv, Symbol::T, a.width());
  at(out, Symbol::T, a.heads * a.dim);
  require(a.angles == -1 || (at(a.angles).symbol == Symbol::T && at(a.angles).width <= a.dim),
          "more rotated pairs than a head holds");
  add_attention(a, qkv, qkv, out);
}

void Program::attend_mla(int q, int kv, std::optional<int> selected, const Attention& attention, int out) {
  const auto& a = attention;
  require(a.heads >= 1 && a.heads <= 65536 && a.kv_heads == 1, "MLA has one KV head");
  require(a.v_dim >= 1 && a.v_dim < a.dim && a.dim <= 65536, "the values of MLA are a part of its keys");
  require(a.gain.size() == a.v_dim, "a norm has one gain for each value");
  require(q != out && kv != out, "attention cannot write to a buffer that it reads");
  at(q, Symbol::T, a.heads * a.dim);
  at(kv, Symbol::T, a.dim);
  at(out, Symbol::T, a.heads * a.v_dim);
  require(a.angles == -1 || (at(a.angles).symbol == Symbol::T && at(a.angles).width <= a.dim - a.v_dim),
          "the dimensions of values are not rotated");
  require(selected.has_value() == (a.top_k > 0), "attention to some positions needs a selection of them");
  if (selected) at(*selected, Symbol::T, a.top_k);
  add_attention(a, q, kv, out);
  if (!selected) return;
  phases_.push_back(sparse_phase(a, q, *selected, out));
  prepare_rows(out);
}

void Program::select_positions(int q, int k, int weights, const Index& index, KvShape shape, int out) {
  require(index.heads >= 1 && index.heads <= 65536 && index.top_k >= 1, "an index has at least one head and position");
  require(index.dim >= 2 && index.dim <= 65536 && index.dim % 2 == 0, "an index key needs an even number of values");
  require(shape.index_dim == index.dim, "the KV cache has no room for these index keys");
  at(q, Symbol::T, index.heads * index.dim);
  at(k, Symbol::T, index.dim);
  at(weights, Symbol::T, index.heads);
  at(out, Symbol::T, index.top_k);
  require(out != q && out != weights, "a selection cannot be written to a buffer that it reads");
  require(index.angles == -1 || (at(index.angles).symbol == Symbol::T && at(index.angles).width <= index.dim),
          "more rotated pairs than an index key holds");
  cache_.add_layer(index.layer, shape);
  scratch_floats_ = std::max(scratch_floats_, index.scratch_floats());
  selects_ = true;
  phases_.push_back(store_index_phase(index, k));
  phases_.push_back(score_phase(index, q, weights));
  phases_.push_back(select_phase(index, q, weights, out));
}

void Program::add_attention(const Attention& a, int q, int keys, int out) {
  require(!a.shares_kv || a.layer < cache_.layers(), "a layer must write keys and values before another one reads them");
  cache_.add_layer(a.layer, a.shape());
  scratch_floats_ = std::max(scratch_floats_, a.scratch_floats());
  partial_floats_ = std::max(partial_floats_, a.head_groups() * a.partial_floats());
  windows_.resize(cache_.layers(), a.reach());
  windows_[a.layer] = longer_window(windows_[a.layer], a.reach());
  causal_ &= a.causal;
  if (!a.shares_kv) phases_.push_back(store_phase(a, keys));
  phases_.push_back(attend_phase(a, q, out));
  phases_.push_back(merge_phase(a, out));
  prepare_rows(out);
}

void Program::per_head_linear(int x, std::shared_ptr<const Weight> weight, size_t heads, size_t passthrough, int out) {
  const Buffer& from = at(x);
  require_panels(*weight);
  require(heads >= 1 && weight->rows() % heads == 0, "every head needs as many rows of the weight as the others");
  const size_t width = weight->width(), rows = weight->rows() / heads;
  at(x, from.symbol, heads * (width + passthrough));
  at(out, from.symbol, heads * (passthrough + rows));
  require(x != out, "a product cannot write to the buffer that it reads");
  require(from.prepared || !prepares(*weight), "this weight needs a prepared buffer");
  require(!prepares(*weight) || (width % BLOCK == 0 && (passthrough % BLOCK == 0 || !weight->coded())),
          "heads are multiplied in whole blocks of 32 values");
  for (size_t head = 0; head < heads; ++head)
    require(weight->rows(head) == rows, "every head needs a part of the weight");
  buffers_[size_t(x)].coded |= weight->coded();
  buffers_[size_t(x)].bfloat |= weight->bfloat() && isa_.kernels->to_bfloats;
  phases_.push_back(heads_phase(x, std::move(weight), heads, passthrough, out));
  if (!passthrough) return prepare_rows(out);
  each_row(out, [=](const Frame& frame, size_t r) {
    const float* row = frame.buffers[size_t(x)].row(r);
    float* to = frame.buffers[size_t(out)].row(r);
    for (size_t head = 0; head < heads; ++head)
      std::copy_n(row + head * (width + passthrough) + width, passthrough, to + head * (passthrough + rows));
  });
}

}  // namespace penstock
