#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "require.h"

namespace penstock {

namespace {

constexpr size_t STORE_TOKENS = 8;  // per chunk
constexpr size_t HEADS_TOGETHER = 8;  // of those that share all their keys
constexpr size_t AHEAD = 2 * TILE;  // places whose keys are on their way while others are scored

Rotation rotation(const Frame& frame, const Attention& a, size_t token) {
  if (a.angles < 0) return {nullptr, nullptr, 0, false};
  const Buffer& angles = frame.buffers[size_t(a.angles)];
  const size_t pairs = angles.width / 2;
  return {angles.row(token), angles.row(token) + pairs, pairs, a.interleaved};
}

size_t row_of(const Batch& batch, size_t token) {
  const int32_t* next = std::upper_bound(batch.row_start, batch.row_start + batch.rows + 1, int32_t(token));
  return size_t(next - batch.row_start) - 1;
}

void store_latent(const Frame& frame, const Attention& a, const float* row, size_t token, float* key, std::byte* tile,
                  size_t lane) {
  float* values = key + a.dim - a.v_dim;
  frame.kernels.rotate(row, a.dim, rotation(frame, a, token), 1.0f, key);
  frame.kernels.add_norm(values, nullptr, a.gain.data(), a.eps, a.v_dim, nullptr, values);
  frame.cache.latent_kernels(frame.kernels).store(key, a.dim, a.v_dim, lane, tile);
}

void store_token(const Frame& frame, const Attention& a, int qkv, size_t token, float* key) {
  const size_t place = frame.cache.place(size_t(frame.batch.positions[token]));
  const int32_t* table = frame.table(a.layer, row_of(frame.batch, token));
  const float* row = frame.buffers[size_t(qkv)].row(token);
  if (a.v_dim) return store_latent(frame, a, row, token, key, frame.cache.tile(a.layer, 0, table, place), place % TILE);
  const float* keys = row + a.heads * a.dim;
  const float* values = keys + a.kv_heads * a.dim;
  for (size_t head = 0; head < a.kv_heads; ++head) {
    frame.kernels.rotate(keys + head * a.dim, a.dim, rotation(frame, a, token), 1.0f, key);
    frame.cache.kernels(frame.kernels)
        .store(key, values + head * a.dim, a.dim, a.shape().padded(), place % TILE,
               frame.cache.tile(a.layer, head, table, place));
  }
}

// What queries have gathered of the positions seen so far.
struct State {
  size_t count, padded;
  float* mixed;    // [count][padded]
  float* highest;  // [count]
  float* sums;     // [count]

  State(float* memory, size_t count, size_t padded)
      : count(count), padded(padded), mixed(memory), highest(mixed + count * padded), sums(highest + count) {}

  void clear() const {
    std::fill(mixed, highest, 0.0f);
    std::fill(highest, sums, -std::numeric_limits<float>::infinity());
    std::fill(sums, sums + count, 0.0f);
  }

  // Takes in what was gathered of the positions after its own.
  void join(const Kernels& kernels, const State& next) const {
    for (size_t i = 0; i < count; ++i) {
      if (next.sums[i] == 0) continue;
      const float most = std::max(highest[i], next.highest[i]);
      const float mine = std::exp(highest[i] - most), theirs = std::exp(next.highest[i] - most);
      kernels.scale(mixed + i * padded, padded, mine);
      kernels.f32.mix(&theirs, 1, next.mixed + i * padded, 1, 0, padded, mixed + i * padded);
      highest[i] = most;
      sums[i] = sums[i] * mine + next.sums[i] * theirs;
    }
  }
};

// The queries of one tile of tokens and one group of heads.
class Queries {
 public:
  Queries(const Frame& frame, const Attention& a, const QueryTile& tile, size_t group)
      : frame_(frame),
        a_(a),
        tile_(tile),
        table_(frame.table(a.layer, tile.row)),
        group_(group),
        padded_(a.shape().padded()) {}

  size_t count() const { return tile_.count * a_.group(); }
  State state(float* memory) const { return {memory, count(), padded_}; }

  void load(const Buffer& qkv, float* scratch) {
    queries_ = scratch;
    scores_ = queries_ + count() * a_.dim;
    for (size_t i = 0; i < count(); ++i)
      frame_.kernels.rotate(qkv.row(token(i)) + head(i) * a_.dim, a_.dim, rotation(frame_, a_, token(i)), a_.scale,
                            queries_ + i * a_.dim);
  }

  float* after_scores() const { return scores_ + count() * SPAN; }

  void attend(size_t part, const State& state) const {
    state.clear();
    size_t first = SIZE_MAX, last = 0;
    for (size_t i = 0; i < count(); i += a_.group()) {
      first = std::min(first, first_place(i) / TILE * TILE);
      last = std::max(last, last_place(i));
    }
    last = std::min(last, (part + 1) * PART);
    for (size_t span = std::max(first / SPAN * SPAN, part * PART); span < last; span += SPAN)
      attend_span(span, std::max(span, first), std::min(span + SPAN, last), last - 1, state);
  }

  void write(const State& state, const Buffer& out) const {
    for (size_t i = 0; i < count(); ++i) {
      const float sink = a_.sinks.empty() ? 0.0f : std::exp(a_.sinks[head(i)] - state.highest[i]);
      frame_.kernels.scale(state.mixed + i * padded_, padded_, 1.0f / (state.sums[i] + sink));
      std::copy_n(state.mixed + i * padded_, a_.value_dim(), out.row(token(i)) + head(i) * a_.value_dim());
    }
  }

 private:
  size_t token(size_t i) const { return tile_.first + i / a_.group(); }
  size_t head(size_t i) const { return group_ * a_.group() + i % a_.group(); }
  size_t position(size_t i) const { return size_t(frame_.batch.positions[token(i)]); }
  size_t first_place(size_t i) const {
    const size_t seen = position(i) + 1;
    return frame_.cache.place(a_.window && seen > a_.window ? seen - a_.window : 0);
  }
  size_t last_place(size_t i) const { return a_.causal ? frame_.cache.place(position(i)) + 1 : tile_.end; }

  // Spans and tiles stand at fixed places of the sequence, so a query adds up in the same order in any chunking.
  void attend_span(size_t span, size_t first, size_t last, size_t end, const State& state) const {
    const auto& kernels = frame_.cache.kernels(frame_.kernels);
    const auto& latent = frame_.cache.latent_kernels(frame_.kernels);
    for (size_t place = first; place < last; place += TILE) {
      float* scores = scores_ + (place - span);
      if (a_.v_dim)
        latent.score(queries_, count(), a_.dim, a_.v_dim, tile_at(place), scores);
      else
        kernels.score(queries_, count(), a_.dim, tile_at(place), tile_at(std::min(place + AHEAD, end)), scores);
    }
    for (size_t i = 0; i < count(); ++i) soften(i, span, first, last, state);
    for (size_t place = first; place < last; place += TILE)
      (a_.v_dim ? latent.mix : kernels.mix)(scores_ + (place - span), count(), tile_at(place),
                                            std::min(TILE, last - place), a_.dim, padded_, state.mixed);
  }

  std::byte* tile_at(size_t place) const {
    return frame_.cache.tile(a_.layer, a_.kv_head(group_), table_, place);
  }

  void soften(size_t i, size_t span, size_t first, size_t last, const State& state) const {
    const size_t end = (last + TILE - 1) / TILE * TILE;
    const size_t from = std::max(first, first_place(i)), to = std::min(last, last_place(i));
    float* scores = scores_ + i * SPAN;
    if (from >= to) return std::fill(scores + (first - span), scores + (end - span), 0.0f);
    if (a_.soft_cap > 0) frame_.kernels.soft_cap(scores + (first - span), end - first, a_.soft_cap);
    constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
    std::fill(scores + (first - span), scores + (from - span), HIDDEN);
    std::fill(scores + (to - span), scores + (end - span), HIDDEN);
    if (frame_.cache.has_unused())
      for (size_t place = from; place < to; ++place)
        if (frame_.cache.unused(place)) scores[place - span] = HIDDEN;
    frame_.kernels.soften(scores + (first - span), end - first, state.highest[i], state.sums[i], padded_,
                          state.mixed + i * padded_);
  }

  const Frame& frame_;
  const Attention& a_;
  const QueryTile& tile_;
  const int32_t* table_;
  size_t group_, padded_;
  float* queries_ = nullptr;  // [count][dim]
  float* scores_ = nullptr;   // [count][SPAN]
};

float* gathered(const Frame& frame, const Attention& a, size_t piece, size_t group) {
  return frame.gathered.as<float>() + (piece * a.groups() + group) * a.state_floats();
}

void plan_tiles(Frame& frame, bool causal) {
  frame.tiles.clear();
  const auto place_of_highest = [&](size_t first, size_t count) {
    const int32_t* positions = frame.batch.positions + first;
    return frame.cache.place(size_t(*std::max_element(positions, positions + count)));
  };
  for (size_t row = 0; row < frame.batch.rows; ++row) {
    const size_t begin = size_t(frame.batch.row_start[row]), last = size_t(frame.batch.row_start[row + 1]);
    const size_t end = causal || begin == last ? 0 : place_of_highest(begin, last - begin) + 1;
    for (size_t first = begin; first < last; first += QUERY_TILE) {
      const size_t count = std::min(QUERY_TILE, last - first);
      const size_t highest = causal ? place_of_highest(first, count) : end - 1;
      frame.tiles.push_back({row, first, count, highest / PART + 1, end});
    }
  }
}

}  // namespace

void plan_attention(Frame& frame, bool causal) {
  plan_tiles(frame, causal);
  size_t work = 0;
  for (const auto& tile : frame.tiles) work += tile.count * tile.parts;
  frame.pieces.clear();
  frame.split.clear();
  for (size_t t = frame.tiles.size(); t-- > 0;) {  // the last tiles of a long row see the most and go first
    const QueryTile& tile = frame.tiles[t];
    // A tile that is a good share of the work would keep one worker busy while the others wait.
    if (tile.parts == 1 || tile.count * tile.parts * frame.workers * 2 < work) {
      frame.pieces.push_back({t, 0, tile.parts});
      continue;
    }
    frame.split.push_back(frame.pieces.size());
    for (size_t part = 0; part < tile.parts; ++part) frame.pieces.push_back({t, part, 1});
  }
}

// All heads of latent attention share one KV head: few enough of them go together that workers have something to share.
size_t Attention::groups() const {
  if (!v_dim) return kv_heads;
  size_t together = std::min(heads, HEADS_TOGETHER);
  while (heads % together) --together;
  return heads / together;
}

size_t Attention::state_floats() const { return QUERY_TILE * group() * (shape().padded() + 2); }

size_t Attention::scratch_floats() const { return QUERY_TILE * group() * (dim + SPAN) + 2 * state_floats(); }

Attention attention_of(size_t layer, int angles, Numbers numbers, Vectors vectors) {
  const auto number = [&](const char* name, double otherwise) {
    const auto found = numbers.extract(name);
    return found ? found.mapped() : otherwise;
  };
  const auto count = [&](const char* name, double otherwise) {
    const double value = number(name, otherwise);
    require(value >= 0 && value <= INT32_MAX && value == std::floor(value), std::string(name) + " is no count");
    return size_t(value);
  };
  const auto vector = [&](const char* name) {
    const auto found = vectors.extract(name);
    return found ? found.mapped() : std::vector<float>();
  };
  const Attention a = {.layer = layer,
                       .heads = count("heads", 0),
                       .kv_heads = count("kv_heads", 0),
                       .dim = count("head_dim", 0),
                       .window = count("window", 0),
                       .angles = angles,
                       .interleaved = number("interleaved", 0) != 0,
                       .scale = float(number("scale", 1)),
                       .soft_cap = float(number("soft_cap", 0)),
                       .causal = number("causal", 1) != 0,
                       .sinks = vector("sinks"),
                       .v_dim = count("v_dim", 0),
                       .gain = vector("gain"),
                       .eps = float(number("eps", 0))};
  require(numbers.empty(), "this attention has no option " + (numbers.empty() ? "" : numbers.begin()->first));
  require(vectors.empty(), "this attention has no vector " + (vectors.empty() ? "" : vectors.begin()->first));
  require(a.sinks.empty() || a.sinks.size() == a.heads, "attention has one sink for each head");
  return a;
}

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
  const auto chunks = [=](const Frame& frame) { return frame.pieces.size() * attention.groups(); };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned worker) {
    const size_t index = chunk / attention.groups(), group = chunk % attention.groups();
    const Piece& piece = frame.pieces[index];
    const QueryTile& tile = frame.tiles[piece.tile];
    Queries queries(frame, attention, tile, group);
    queries.load(frame.buffers[size_t(qkv)], frame.scratch[worker].as<float>());
    const bool whole = piece.parts == tile.parts;
    const State total = queries.state(whole ? queries.after_scores() : gathered(frame, attention, index, group));
    const State next = queries.state(queries.after_scores() + attention.state_floats());
    queries.attend(piece.part, total);
    for (size_t part = 1; part < piece.parts; ++part) {
      queries.attend(part, next);
      total.join(frame.kernels, next);
    }
    if (whole) queries.write(total, frame.buffers[size_t(out)]);
  };
  return {chunks, run};
}

Phase join_phase(const Attention& attention, int out) {
  const auto chunks = [=](const Frame& frame) { return frame.split.size() * attention.groups(); };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned) {
    const size_t first = frame.split[chunk / attention.groups()], group = chunk % attention.groups();
    const QueryTile& tile = frame.tiles[frame.pieces[first].tile];
    const Queries queries(frame, attention, tile, group);
    const State total = queries.state(gathered(frame, attention, first, group));
    for (size_t part = 1; part < tile.parts; ++part)
      total.join(frame.kernels, queries.state(gathered(frame, attention, first + part, group)));
    queries.write(total, frame.buffers[size_t(out)]);
  };
  return {chunks, run};
}

}  // namespace penstock
