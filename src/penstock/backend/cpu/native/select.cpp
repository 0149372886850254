#include "select.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace penstock {

namespace {

constexpr size_t STORE_TOKENS = 8;     // per chunk
constexpr size_t SHARED_TOKENS = 64;   // in steps of at most this many tokens, workers share contexts
constexpr size_t PIECE = 8 * SPAN;    // places of a context for one worker
constexpr size_t AHEAD = 2 * TILE;     // places whose keys are prefetched while others are scored

size_t position_of(const Frame& frame, size_t token) { return size_t(frame.batch.positions[token]); }

// The scores of one token's positions, before they are selected.
class TokenScores {
 public:
  TokenScores(const Frame& frame, const Index& index, size_t token)
      : frame_(frame),
        index_(index),
        token_(token),
        table_(frame.table(index.layer, row_of(frame.batch, token))),
        places_(frame.cache.place(position_of(frame, token)) + 1) {}

  size_t places() const { return places_; }

  // Scores the places from `first`, a multiple of SPAN, up to `last`.
  void score(const Buffer& q, const Buffer& weights, size_t first, size_t last, float* scratch, float* out) const {
    float* queries = scratch;
    float* scores = queries + index_.heads * index_.dim;
    for (size_t head = 0; head < index_.heads; ++head)
      frame_.kernels.rotate(q.row(token_) + head * index_.dim, index_.dim,
                            rotation(frame_, index_.angles, index_.interleaved, token_), 1.0f,
                            queries + head * index_.dim);
    const KvKernels& kernels = frame_.cache.key_kernels(frame_.kernels);
    const size_t tile_bytes = frame_.cache.index_bytes(index_.dim);
    last = std::min(last, places_);
    for (size_t span = first; span < last; span += SPAN) {
      const size_t end = std::min(span + SPAN, (last + TILE - 1) / TILE * TILE);
      for (size_t place = span; place < end; place += TILE)
        kernels.score(queries, index_.heads, index_.dim, tile_at(place), tile_at(std::min(place + AHEAD, places_ - 1)),
                      tile_bytes, scores + (place - span));
      frame_.kernels.index_scores(scores, weights.row(token_), index_.heads, end - span, out + span);
    }
  }

  // Writes the positions with the highest scores, ascending; the first of equal ones. The scores come by places.
  void select(float* scores, int32_t* candidates, float* out) const {
    const size_t count = position_of(frame_, token_) + 1;
    constexpr float LOWEST = -std::numeric_limits<float>::infinity();
    for (size_t position = 0; position < count; ++position) {
      const float score = scores[frame_.cache.place(position)];
      scores[position] = score == score ? score : LOWEST;  // NaN has no order
    }
    std::iota(candidates, candidates + count, 0);
    int32_t* end = candidates + index_.top_k;
    std::nth_element(candidates, end - 1, candidates + count, [scores](int32_t one, int32_t other) {
      return scores[one] != scores[other] ? scores[one] > scores[other] : one < other;
    });
    std::sort(candidates, end);
    std::copy(candidates, end, out);
  }

 private:
  std::byte* tile_at(size_t place) const { return frame_.cache.index_tile(index_.layer, table_, place); }

  const Frame& frame_;
  const Index& index_;
  size_t token_;
  const int32_t* table_;
  size_t places_;
};

}  // namespace

void plan_index(Frame& frame) {
  size_t places = 0;
  for (size_t token = 0; token < frame.batch.tokens_count; ++token)
    places = std::max(places, frame.cache.place(position_of(frame, token)) + 1);
  IndexScores& index = frame.index;
  index.width = (places + SPAN - 1) / SPAN * SPAN;
  index.by_token = frame.batch.tokens_count <= SHARED_TOKENS;
  const size_t rows = index.by_token ? frame.batch.tokens_count : frame.workers;
  const auto make_room = [](Memory& memory, size_t bytes) {
    if (memory.bytes() < bytes) memory = Memory(bytes);
  };
  make_room(index.scores, rows * index.width * sizeof(float));
  make_room(index.candidates, frame.workers * index.width * sizeof(int32_t));
}

Phase store_index_phase(const Index& index, int k) {
  const auto chunks = [](const Frame& frame) { return (frame.batch.tokens_count + STORE_TOKENS - 1) / STORE_TOKENS; };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned worker) {
    const size_t last = std::min((chunk + 1) * STORE_TOKENS, frame.batch.tokens_count);
    float* key = frame.scratch[worker].as<float>();
    for (size_t token = chunk * STORE_TOKENS; token < last; ++token) {
      const size_t place = frame.cache.place(position_of(frame, token));
      const int32_t* table = frame.table(index.layer, row_of(frame.batch, token));
      frame.kernels.rotate(frame.buffers[size_t(k)].row(token), index.dim,
                           rotation(frame, index.angles, index.interleaved, token), 1.0f, key);
      frame.cache.key_kernels(frame.kernels)
          .store_key(key, index.dim, place % TILE, frame.cache.index_tile(index.layer, table, place));
    }
  };
  return {chunks, run};
}

Phase score_phase(const Index& index, int q, int weights) {
  const auto pieces = [](const Frame& frame) { return (frame.index.width + PIECE - 1) / PIECE; };
  const auto chunks = [=](const Frame& frame) {
    return frame.index.by_token ? frame.batch.tokens_count * pieces(frame) : 0;
  };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned worker) {
    const size_t token = chunk / pieces(frame), first = chunk % pieces(frame) * PIECE;
    const TokenScores scores(frame, index, token);
    if (position_of(frame, token) < index.top_k || first >= scores.places()) return;
    scores.score(frame.buffers[size_t(q)], frame.buffers[size_t(weights)], first, first + PIECE,
                 frame.scratch[worker].as<float>(), frame.index.scores.as<float>() + token * frame.index.width);
  };
  return {chunks, run};
}

Phase select_phase(const Index& index, int q, int weights, int out) {
  const auto chunks = [](const Frame& frame) { return frame.batch.tokens_count; };
  const auto run = [=](const Frame& frame, size_t token, unsigned worker) {
    float* selected = frame.buffers[size_t(out)].row(token);
    if (position_of(frame, token) < index.top_k) return std::iota(selected, selected + position_of(frame, token) + 1, 0.0f);
    const TokenScores scores(frame, index, token);
    const size_t row = frame.index.by_token ? token : worker;
    float* values = frame.index.scores.as<float>() + row * frame.index.width;
    if (!frame.index.by_token)
      scores.score(frame.buffers[size_t(q)], frame.buffers[size_t(weights)], 0, scores.places(),
                   frame.scratch[worker].as<float>(), values);
    scores.select(values, frame.index.candidates.as<int32_t>() + worker * frame.index.width, selected);
  };
  return {chunks, run};
}

}  // namespace penstock
