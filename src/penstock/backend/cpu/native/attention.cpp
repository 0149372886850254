#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "require.h"

namespace penstock {

namespace {

constexpr size_t STORE_TOKENS = 8;  // per chunk
constexpr size_t HEADS_TOGETHER = 8;  // heads of MLA in one group
constexpr size_t AHEAD = 2 * TILE;  // places whose keys are prefetched while others are scored

Rotation rotation(const Frame& frame, const Attention& a, size_t token) {
  return penstock::rotation(frame, a.angles, a.interleaved, token);
}

// Pads both parts of a head of MLA, the rotated one and the values, with zeros to what tiles hold.
void pad_mla(const Attention& a, float* head) {
  const KvShape shape = a.shape();
  const size_t rotated = a.dim - a.v_dim, first = shape.dim - shape.v_dim;
  if (first != rotated) std::copy_backward(head + rotated, head + a.dim, head + first + a.v_dim);
  std::fill(head + rotated, head + first, 0.0f);
  std::fill(head + first + a.v_dim, head + shape.dim, 0.0f);
}

void store_mla(const Frame& frame, const Attention& a, const float* row, size_t token, float* key, std::byte* tile,
                  size_t lane) {
  float* values = key + a.dim - a.v_dim;
  frame.kernels.rotate(row, a.dim, rotation(frame, a, token), 1.0f, key);
  frame.kernels.add_norm(values, nullptr, a.gain.data(), a.eps, a.v_dim, nullptr, values);
  pad_mla(a, key);
  frame.cache.mla_kernels(frame.kernels).store(key, a.shape().dim, a.shape().v_dim, lane, tile);
}

void store_token(const Frame& frame, const Attention& a, int qkv, size_t token, float* key) {
  const size_t place = frame.cache.place(size_t(frame.batch.positions[token]));
  const int32_t* table = frame.table(a.layer, row_of(frame.batch, token));
  const float* row = frame.buffers[size_t(qkv)].row(token);
  if (a.v_dim) return store_mla(frame, a, row, token, key, frame.cache.tile(a.layer, 0, table, place), place % TILE);
  const float* keys = row + a.heads * a.dim;
  const float* values = keys + a.kv_heads * a.dim;
  for (size_t head = 0; head < a.kv_heads; ++head) {
    std::byte* tile = frame.cache.tile(a.layer, head, table, place);
    frame.kernels.rotate(keys + head * a.dim, a.dim, rotation(frame, a, token), 1.0f, key);
    if (frame.cache.transforms_keys()) frame.kernels.hadamard(key, a.dim);
    frame.cache.key_kernels(frame.kernels).store_key(key, a.dim, place % TILE, tile);
    frame.cache.value_kernels(frame.kernels)
        .store_value(values + head * a.dim, a.dim, a.shape().padded(), place % TILE,
                     tile + frame.cache.key_bytes(a.shape()));
  }
}

// The softmax and the mix of values so far: what some queries have found in some of the positions.
struct Partial {
  size_t count, padded;
  float* mixed;    // [count][padded]
  float* highest;  // [count]
  float* sums;     // [count]

  Partial(float* memory, size_t count, size_t padded)
      : count(count), padded(padded), mixed(memory), highest(mixed + count * padded), sums(highest + count) {}

  void clear() const {
    std::fill(mixed, highest, 0.0f);
    std::fill(highest, sums, -std::numeric_limits<float>::infinity());
    std::fill(sums, sums + count, 0.0f);
  }

  // Adds the results of the positions that follow.
  void merge(const Kernels& kernels, const Partial& next) const {
    for (size_t i = 0; i < count; ++i) {
      if (next.sums[i] == 0) continue;
      const float most = std::max(highest[i], next.highest[i]);
      const float mine = std::exp(highest[i] - most), theirs = std::exp(next.highest[i] - most);
      kernels.scale(mixed + i * padded, padded, mine);
      kernels.f32.mix(&theirs, 1, next.mixed + i * padded, 1, padded, mixed + i * padded);
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
        dim_(a.shape().dim),
        padded_(a.shape().padded()) {}

  size_t count() const { return tile_.count * a_.group_heads(); }
  Partial partial(float* memory) const { return {memory, count(), padded_}; }

  void load(const Buffer& qkv, float* scratch) {
    queries_ = scratch;
    scores_ = queries_ + count() * dim_;
    for (size_t i = 0; i < count(); ++i) {
      float* query = queries_ + i * dim_;
      frame_.kernels.rotate(qkv.row(token(i)) + head(i) * a_.dim, a_.dim, rotation(frame_, a_, token(i)),
                            a_.query_scale(position(i)), query);
      for (size_t d = 0; d < a_.q_gain.size(); ++d) query[d] *= a_.q_gain[d];
      if (a_.v_dim) pad_mla(a_, query);
      else if (frame_.cache.transforms_keys()) frame_.kernels.hadamard(query, a_.dim);
    }
  }

  float* after_scores() const { return scores_ + count() * SPAN; }

  void attend(size_t split, const Partial& partial) const {
    partial.clear();
    size_t first = SIZE_MAX, last = 0;
    for (size_t i = 0; i < count(); i += a_.group_heads()) {
      first = std::min(first, first_place(i) / TILE * TILE);
      last = std::max(last, last_place(i));
    }
    last = std::min(last, (split + 1) * SPLIT);
    for (size_t span = std::max(first / SPAN * SPAN, split * SPLIT); span < last; span += SPAN)
      attend_span(span, std::max(span, first), std::min(span + SPAN, last), last - 1, partial);
  }

  // Attends only to the first `n` of these positions; their keys are copied to `tiles` first.
  void attend_to(const float* selected, size_t n, std::byte* tiles, const Partial& partial) const {
    const auto& mla = frame_.cache.mla_kernels(frame_.kernels);
    const size_t tile_bytes = frame_.cache.kv_tile_bytes(a_.shape());
    partial.clear();
    for (size_t span = 0; span < n; span += SPAN) {
      const size_t last = std::min(SPAN, n - span), end = (last + TILE - 1) / TILE * TILE;
      for (size_t j = 0; j < last; ++j) {
        const size_t place = frame_.cache.place(size_t(selected[span + j]));
        mla.copy(tile_at(place), place % TILE, dim_, tiles + j / TILE * tile_bytes, j % TILE);
      }
      for (size_t j = 0; j < last; j += TILE)
        mla.score(queries_, count(), dim_, padded_, tiles + j / TILE * tile_bytes, scores_ + j);
      for (size_t i = 0; i < count(); ++i) {
        float* scores = scores_ + i * SPAN;
        std::fill(scores + last, scores + end, -std::numeric_limits<float>::infinity());
        frame_.kernels.soften(scores, end, partial.highest[i], partial.sums[i], padded_, partial.mixed + i * padded_);
      }
      for (size_t j = 0; j < last; j += TILE)
        mla.mix(scores_ + j, count(), tiles + j / TILE * tile_bytes, std::min(TILE, last - j), dim_, padded_,
                partial.mixed);
    }
  }

  void write(const Partial& partial, const Buffer& out) const {
    for (size_t i = 0; i < count(); ++i) {
      const float sink = a_.sinks.empty() ? 0.0f : std::exp(a_.sinks[head(i)] - partial.highest[i]);
      frame_.kernels.scale(partial.mixed + i * padded_, padded_, 1.0f / (partial.sums[i] + sink));
      std::copy_n(partial.mixed + i * padded_, a_.value_dim(), out.row(token(i)) + head(i) * a_.value_dim());
    }
  }

 private:
  size_t token(size_t i) const { return tile_.first + i / a_.group_heads(); }
  size_t head(size_t i) const { return group_ * a_.group_heads() + i % a_.group_heads(); }
  size_t position(size_t i) const { return size_t(frame_.batch.positions[token(i)]); }
  size_t first_place(size_t i) const {
    const size_t seen = position(i) + 1;
    const size_t in_window = a_.window && seen > a_.window ? seen - a_.window : 0;
    const size_t in_chunk = a_.chunk ? position(i) / a_.chunk * a_.chunk : 0;
    return frame_.cache.place(std::max(in_window, in_chunk));
  }
  size_t last_place(size_t i) const {
    if (a_.causal) return frame_.cache.place(position(i)) + 1;
    return a_.window ? std::min(tile_.end, frame_.cache.place(position(i) + a_.window - 1) + 1) : tile_.end;
  }

  // Spans and tiles begin at fixed places of the sequence, so a query adds up in the same order in any chunking.
  void attend_span(size_t span, size_t first, size_t last, size_t end, const Partial& partial) const {
    for (size_t place = first; place < last; place += TILE)
      score_tile(tile_at(place), tile_at(std::min(place + AHEAD, end)), scores_ + (place - span));
    for (size_t i = 0; i < count(); ++i) softmax(i, span, first, last, partial);
    for (size_t place = first; place < last; place += TILE)
      mix_tile(scores_ + (place - span), tile_at(place), std::min(TILE, last - place), partial.mixed);
  }

  void score_tile(const std::byte* tile, const std::byte* soon, float* scores) const {
    const Cache& cache = frame_.cache;
    if (a_.v_dim) return cache.mla_kernels(frame_.kernels).score(queries_, count(), dim_, padded_, tile, scores);
    const size_t bytes = cache.kv_tile_bytes(a_.shape());
    cache.key_kernels(frame_.kernels).score(queries_, count(), dim_, tile, soon, bytes, scores);
  }

  void mix_tile(const float* weights, const std::byte* tile, size_t n, float* out) const {
    const Cache& cache = frame_.cache;
    if (a_.v_dim) return cache.mla_kernels(frame_.kernels).mix(weights, count(), tile, n, dim_, padded_, out);
    const std::byte* values = tile + cache.key_bytes(a_.shape());
    cache.value_kernels(frame_.kernels).mix(weights, count(), values, n, padded_, out);
  }

  std::byte* tile_at(size_t place) const {
    return frame_.cache.tile(a_.layer, a_.kv_head(group_), table_, place);
  }

  void softmax(size_t i, size_t span, size_t first, size_t last, const Partial& partial) const {
    const size_t end = (last + TILE - 1) / TILE * TILE;
    const size_t from = std::max(first, first_place(i)), to = std::min(last, last_place(i));
    float* scores = scores_ + i * SPAN;
    if (from >= to) return std::fill(scores + (first - span), scores + (end - span), 0.0f);
    if (a_.soft_cap > 0) frame_.kernels.soft_cap(scores + (first - span), end - first, a_.soft_cap);
    if (!a_.distance_bias.empty())
      for (size_t place = first; place < end; place += TILE) add_bias(i, place, scores + (place - span));
    constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
    std::fill(scores + (first - span), scores + (from - span), HIDDEN);
    std::fill(scores + (to - span), scores + (end - span), HIDDEN);
    if (frame_.cache.has_unused())
      for (size_t place = from; place < to; ++place)
        if (frame_.cache.unused(place)) scores[place - span] = HIDDEN;
    frame_.kernels.soften(scores + (first - span), end - first, partial.highest[i], partial.sums[i], padded_,
                          partial.mixed + i * padded_);
  }

  // Adds a head's biases for the distances of a query to a tile of keys.
  void add_bias(size_t i, size_t place, float* scores) const {
    const ptrdiff_t most = a_.farthest(), least = 1 - ptrdiff_t(TILE) - most;
    const ptrdiff_t distance = ptrdiff_t(frame_.cache.position(place)) - ptrdiff_t(position(i));
    const float* bias = &a_.distance_bias[head(i) * a_.distances()] + (std::clamp(distance, least, most) - least);
    for (size_t lane = 0; lane < TILE; ++lane) scores[lane] += bias[lane];
  }

  const Frame& frame_;
  const Attention& a_;
  const QueryTile& tile_;
  const int32_t* table_;
  size_t group_, dim_, padded_;
  float* queries_ = nullptr;  // [count][dim]
  float* scores_ = nullptr;   // [count][SPAN]
};

float* partial_of(const Frame& frame, const Attention& a, size_t item, size_t group) {
  return frame.partials.as<float>() + (item * a.head_groups() + group) * a.partial_floats();
}

// Whether a tile's tokens all see more positions than they attend to, so that none of them attends to all.
bool is_sparse(const Frame& frame, const Attention& a, const QueryTile& tile) {
  const int32_t* positions = frame.batch.positions + tile.first;
  return a.top_k && size_t(*std::min_element(positions, positions + tile.count)) >= a.top_k;
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
      frame.tiles.push_back({row, first, count, highest / SPLIT + 1, end});
    }
  }
}

// Repeats the first and the last bias of each head, so that any tile of keys finds its own in a row.
std::vector<float> with_edges(const std::vector<float>& bias, size_t heads) {
  const size_t distances = bias.size() / std::max<size_t>(heads, 1);
  require(distances * heads == bias.size() && (bias.empty() || distances % 2), "each head has an odd number of biases");
  std::vector<float> out;
  for (size_t first = 0; first < bias.size(); first += distances) {
    out.insert(out.end(), TILE - 1, bias[first]);
    out.insert(out.end(), &bias[first], &bias[first] + distances);
    out.insert(out.end(), TILE - 1, bias[first + distances - 1]);
  }
  return out;
}

}  // namespace

Rotation rotation(const Frame& frame, int angles, bool interleaved, size_t token) {
  if (angles < 0) return {nullptr, nullptr, 0, false};
  const Buffer& buffer = frame.buffers[size_t(angles)];
  const size_t pairs = buffer.width / 2;
  return {buffer.row(token), buffer.row(token) + pairs, pairs, interleaved};
}

size_t row_of(const Batch& batch, size_t token) {
  const int32_t* next = std::upper_bound(batch.row_start, batch.row_start + batch.rows + 1, int32_t(token));
  return size_t(next - batch.row_start) - 1;
}

void plan_attention(Frame& frame, bool causal) {
  plan_tiles(frame, causal);
  size_t work = 0;
  for (const auto& tile : frame.tiles) work += tile.count * tile.splits;
  frame.work_items.clear();
  frame.split_tiles.clear();
  for (size_t t = frame.tiles.size(); t-- > 0;) {  // the last tiles of a long row see the most and go first
    const QueryTile& tile = frame.tiles[t];
    // A tile that is a large share of the work would keep one worker busy while the others wait.
    if (tile.splits == 1 || tile.count * tile.splits * frame.workers * 2 < work) {
      frame.work_items.push_back({t, 0, tile.splits});
      continue;
    }
    frame.split_tiles.push_back(frame.work_items.size());
    for (size_t split = 0; split < tile.splits; ++split) frame.work_items.push_back({t, split, 1});
  }
}

float Attention::query_scale(size_t position) const {
  if (temperature == 0) return scale;
  return float(scale * (1 + temperature * std::log1p(double((position + 1) / temperature_span))));
}

// All heads of MLA share one KV head. They are divided into groups, so that several workers have something to do.
size_t Attention::head_groups() const {
  if (!v_dim) return kv_heads;
  size_t together = std::min(heads, HEADS_TOGETHER);
  while (heads % together) --together;
  return heads / together;
}

size_t Attention::partial_floats() const { return QUERY_TILE * group_heads() * (shape().padded() + 2); }

size_t Attention::scratch_floats() const {
  const size_t copies = top_k ? SPAN / TILE * (KV_SCALES + shape().mla_values()) : 0;
  return QUERY_TILE * group_heads() * (shape().dim + SPAN) + 2 * partial_floats() + copies;
}

// A tile of MLA holds its two parts in multiples of 16 dimensions.
KvShape Attention::shape() const {
  const auto padded = [](size_t dims) { return (dims + TILE - 1) / TILE * TILE; };
  if (!v_dim) return {kv_heads, dim};
  return {kv_heads, padded(dim - v_dim) + padded(v_dim), padded(v_dim), index_dim};
}

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
  const size_t heads = count("heads", 0);
  const Attention a = {.layer = layer,
                       .heads = heads,
                       .kv_heads = count("kv_heads", 0),
                       .dim = count("head_dim", 0),
                       .window = count("window", 0),
                       .angles = angles,
                       .interleaved = number("interleaved", 0) != 0,
                       .scale = float(number("scale", 1)),
                       .soft_cap = float(number("soft_cap", 0)),
                       .causal = number("causal", 1) != 0,
                       .shares_kv = number("shares_kv", 0) != 0,
                       .chunk = count("chunk", 0),
                       .temperature = number("temperature", 0),
                       .temperature_span = count("temperature_span", 1),
                       .q_gain = vector("q_gain"),
                       .sinks = vector("sinks"),
                       .distance_bias = with_edges(vector("distance_bias"), heads),
                       .v_dim = count("v_dim", 0),
                       .gain = vector("gain"),
                       .eps = float(number("eps", 0)),
                       .index_dim = count("index_dim", 0),
                       .top_k = count("top_k", 0)};
  require(numbers.empty(), "this attention has no option " + (numbers.empty() ? "" : numbers.begin()->first));
  require(vectors.empty(), "this attention has no vector " + (vectors.empty() ? "" : vectors.begin()->first));
  require(a.causal || !a.chunk, "attention that is not causal has no chunks");
  require(a.temperature_span > 0, "the temperature changes after some positions");
  require(a.q_gain.empty() || a.q_gain.size() == a.dim, "the gain of queries is as wide as a head");
  require(a.sinks.empty() || a.sinks.size() == a.heads, "attention has one sink for each head");
  require(a.distance_bias.empty() || !a.causal, "causal attention has no bias by distance");
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
  const auto chunks = [=](const Frame& frame) { return frame.work_items.size() * attention.head_groups(); };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned worker) {
    const size_t index = chunk / attention.head_groups(), group = chunk % attention.head_groups();
    const WorkItem& item = frame.work_items[index];
    const QueryTile& tile = frame.tiles[item.tile];
    if (is_sparse(frame, attention, tile)) return;
    Queries queries(frame, attention, tile, group);
    queries.load(frame.buffers[size_t(qkv)], frame.scratch[worker].as<float>());
    const bool whole = item.splits == tile.splits;
    const Partial total = queries.partial(whole ? queries.after_scores() : partial_of(frame, attention, index, group));
    const Partial next = queries.partial(queries.after_scores() + attention.partial_floats());
    queries.attend(item.split, total);
    for (size_t split = 1; split < item.splits; ++split) {
      queries.attend(split, next);
      total.merge(frame.kernels, next);
    }
    if (whole) queries.write(total, frame.buffers[size_t(out)]);
  };
  return {chunks, run};
}

Phase merge_phase(const Attention& attention, int out) {
  const auto chunks = [=](const Frame& frame) { return frame.split_tiles.size() * attention.head_groups(); };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned) {
    const size_t first = frame.split_tiles[chunk / attention.head_groups()], group = chunk % attention.head_groups();
    const QueryTile& tile = frame.tiles[frame.work_items[first].tile];
    if (is_sparse(frame, attention, tile)) return;
    const Queries queries(frame, attention, tile, group);
    const Partial total = queries.partial(partial_of(frame, attention, first, group));
    for (size_t split = 1; split < tile.splits; ++split)
      total.merge(frame.kernels, queries.partial(partial_of(frame, attention, first + split, group)));
    queries.write(total, frame.buffers[size_t(out)]);
  };
  return {chunks, run};
}

Phase sparse_phase(const Attention& attention, int q, int selected, int out) {
  const size_t groups = attention.head_groups();
  const auto chunks = [=](const Frame& frame) { return frame.batch.tokens_count * groups; };
  const auto run = [=](const Frame& frame, size_t chunk, unsigned worker) {
    const size_t token = chunk / groups;
    if (size_t(frame.batch.positions[token]) < attention.top_k) return;
    const QueryTile tile = {row_of(frame.batch, token), token, 1, 1, 0};
    Queries queries(frame, attention, tile, chunk % groups);
    queries.load(frame.buffers[size_t(q)], frame.scratch[worker].as<float>());
    const Partial total = queries.partial(queries.after_scores());
    float* tiles = queries.after_scores() + attention.partial_floats();
    queries.attend_to(frame.buffers[size_t(selected)].row(token), attention.top_k, reinterpret_cast<std::byte*>(tiles),
                      total);
    queries.write(total, frame.buffers[size_t(out)]);
  };
  return {chunks, run};
}

}  // namespace penstock
