#include "attention.h"

#include <algorithm>
#include <limits>

namespace penstock {

namespace {

constexpr size_t STORE_TOKENS = 8;  // per chunk

Rotation rotation(const Frame& frame, const Attention& a, size_t token) {
  const Buffer& angles = frame.buffers[size_t(a.angles)];
  const size_t pairs = angles.width / 2;
  return {angles.row(token), angles.row(token) + pairs, pairs, a.interleaved};
}

size_t row_of(const Batch& batch, size_t token) {
  const int32_t* next = std::upper_bound(batch.row_start, batch.row_start + batch.rows + 1, int32_t(token));
  return size_t(next - batch.row_start) - 1;
}

void store_token(const Frame& frame, const Attention& a, int qkv, size_t token, float* key) {
  const size_t place = frame.cache.place(size_t(frame.batch.positions[token]));
  const int32_t* table = frame.batch.tables + row_of(frame.batch, token) * frame.batch.table_width;
  const float* keys = frame.buffers[size_t(qkv)].row(token) + a.heads * a.dim;
  const float* values = keys + a.kv_heads * a.dim;
  for (size_t head = 0; head < a.kv_heads; ++head) {
    frame.kernels.rotate(keys + head * a.dim, a.dim, rotation(frame, a, token), 1.0f, key);
    frame.cache.kernels(frame.kernels)
        .store(key, values + head * a.dim, a.dim, a.shape().padded(), place % TILE,
               frame.cache.tile(a.layer, head, table, place));
  }
}

// The queries of one tile of tokens and one KV head, and what they have gathered so far.
class Queries {
 public:
  Queries(const Frame& frame, const Attention& a, const QueryTile& tile, size_t kv_head, float* scratch)
      : frame_(frame), a_(a), tile_(tile), kv_head_(kv_head), count_(tile.count * a.group()), padded_(a.shape().padded()) {
    queries_ = scratch;
    scores_ = queries_ + count_ * a.dim;
    gathered_ = scores_ + count_ * SPAN;
    highest_ = gathered_ + count_ * padded_;
    sums_ = highest_ + count_;
    std::fill(gathered_, highest_, 0.0f);
    std::fill(highest_, sums_, -std::numeric_limits<float>::infinity());
    std::fill(sums_, sums_ + count_, 0.0f);
  }

  void load(const Buffer& qkv) {
    for (size_t i = 0; i < count_; ++i)
      frame_.kernels.rotate(qkv.row(token(i)) + head(i) * a_.dim, a_.dim, rotation(frame_, a_, token(i)), a_.scale,
                            queries_ + i * a_.dim);
  }

  void attend() {
    size_t first = SIZE_MAX, last = 0;
    for (size_t i = 0; i < count_; i += a_.group()) {
      first = std::min(first, first_place(i) / TILE * TILE);
      last = std::max(last, last_place(i));
    }
    for (size_t span = first / SPAN * SPAN; span < last; span += SPAN)
      attend_span(span, std::max(span, first), std::min(span + SPAN, last));
  }

  void write(const Buffer& out) {
    for (size_t i = 0; i < count_; ++i) {
      frame_.kernels.scale(gathered_ + i * padded_, padded_, 1.0f / sums_[i]);
      std::copy_n(gathered_ + i * padded_, a_.dim, out.row(token(i)) + head(i) * a_.dim);
    }
  }

 private:
  size_t token(size_t i) const { return tile_.first + i / a_.group(); }
  size_t head(size_t i) const { return kv_head_ * a_.group() + i % a_.group(); }
  size_t position(size_t i) const { return size_t(frame_.batch.positions[token(i)]); }
  size_t first_place(size_t i) const {
    const size_t seen = position(i) + 1;
    return frame_.cache.place(a_.window && seen > a_.window ? seen - a_.window : 0);
  }
  size_t last_place(size_t i) const { return frame_.cache.place(position(i)) + 1; }

  // Spans and tiles stand at fixed places of the sequence, so a query adds up in the same order in any chunking.
  void attend_span(size_t span, size_t first, size_t last) {
    const auto& kernels = frame_.cache.kernels(frame_.kernels);
    const int32_t* table = frame_.batch.tables + tile_.row * frame_.batch.table_width;
    for (size_t place = first; place < last; place += TILE)
      kernels.score(queries_, count_, a_.dim, frame_.cache.tile(a_.layer, kv_head_, table, place),
                    scores_ + (place - span));
    for (size_t i = 0; i < count_; ++i) soften(i, span, first, last);
    for (size_t place = first; place < last; place += TILE) {
      const std::byte* tile = frame_.cache.tile(a_.layer, kv_head_, table, place);
      kernels.mix(scores_ + (place - span), count_, frame_.cache.values(a_.layer, tile),
                  std::min(TILE, last - place), padded_, gathered_);
    }
  }

  void soften(size_t i, size_t span, size_t first, size_t last) {
    const size_t end = (last + TILE - 1) / TILE * TILE;
    const size_t from = std::max(first, first_place(i)), to = std::min(last, last_place(i));
    float* scores = scores_ + i * SPAN;
    if (from >= to) return std::fill(scores + (first - span), scores + (end - span), 0.0f);
    constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
    std::fill(scores + (first - span), scores + (from - span), HIDDEN);
    std::fill(scores + (to - span), scores + (end - span), HIDDEN);
    if (frame_.cache.has_unused())
      for (size_t place = from; place < to; ++place)
        if (frame_.cache.unused(place)) scores[place - span] = HIDDEN;
    frame_.kernels.soften(scores + (first - span), end - first, highest_[i], sums_[i], padded_, gathered_ + i * padded_);
  }

  const Frame& frame_;
  const Attention& a_;
  const QueryTile& tile_;
  size_t kv_head_, count_, padded_;
  float* queries_;   // [count][dim]
  float* scores_;    // [count][SPAN]
  float* gathered_;  // [count][padded]
  float* highest_;   // [count]
  float* sums_;      // [count]
};

}  // namespace

size_t Attention::scratch_floats() const { return QUERY_TILE * group() * (dim + SPAN + shape().padded() + 2); }

Phase store_phase(const Attention& attention, int qkv) {
  const auto chunks = [](const Frame& frame) { return (frame.batch.tokens_count + STORE_TOKENS - 1) / STORE_TOKENS; };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned worker) {
    const size_t last = std::min((chunk + 1) * STORE_TOKENS, frame.batch.tokens_count);
    for (size_t token = chunk * STORE_TOKENS; token < last; ++token)
      store_token(frame, attention, qkv, token, frame.scratch[worker].as<float>());
  };
  return {chunks, run};
}

Phase attend_phase(const Attention& attention, int qkv, int out) {
  const auto chunks = [=](const Frame& frame) { return frame.tiles.size() * attention.kv_heads; };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned worker) {
    // The last tiles of a long row see the most and go first.
    const QueryTile& tile = frame.tiles[frame.tiles.size() - 1 - chunk / attention.kv_heads];
    Queries queries(frame, attention, tile, chunk % attention.kv_heads, frame.scratch[worker].as<float>());
    queries.load(frame.buffers[size_t(qkv)]);
    queries.attend();
    queries.write(frame.buffers[size_t(out)]);
  };
  return {chunks, run};
}

}  // namespace penstock
