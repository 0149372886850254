#include "sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace penstock {

namespace {

constexpr size_t PART = 8192;             // tokens of the vocabulary that are looked at in one chunk
constexpr size_t GROUP = 64;              // tokens whose largest weight bounds the k-th largest of all
constexpr float MASS_OF_ONE = 0x1p40f;    // the most likely token's: masses are integers, so sums have no order
constexpr float MARGIN = 0.99f;           // more than the rounding of a bound
constexpr int32_t NO_TOKEN = -1;          // the highest logit of a row is not finite, so neither are its weights
constexpr float BANNED = -std::numeric_limits<float>::infinity();

int64_t mass(float weight) { return int64_t(weight * MASS_OF_ONE); }

int64_t mass(const float* weights, size_t n) {
  return std::accumulate(weights, weights + n, int64_t(0), [](int64_t sum, float w) { return sum + mass(w); });
}

// One of the 2^53 equal parts of [0, total) that the seed names.
int64_t spread(uint64_t seed, int64_t total) { return int64_t((unsigned __int128)(seed >> 11) * uint64_t(total) >> 53); }

// The least weight of the smallest set of largest weights whose mass is `needed`; changes the order of the weights.
float least_reaching(std::vector<float>& weights, int64_t needed) {
  auto first = weights.begin(), last = weights.end();
  for (int64_t reached = 0; last - first > 1;) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, std::greater());
    const int64_t above = mass(&*first, size_t(middle - first));
    if (reached + above >= needed) {
      last = middle;
    } else {
      reached += above;
      first = middle;
    }
  }
  return *first;
}

float kth_largest(std::vector<float>& weights, size_t k) {
  std::nth_element(weights.begin(), weights.begin() + ptrdiff_t(k) - 1, weights.end(), std::greater());
  return weights[k - 1];
}

// Those at or above the bound, in vocabulary order.
void gather(Floats weights, float bound, std::vector<Candidate>& out) {
  out.resize(weights.size());
  size_t count = 0;
  for (size_t token = 0; token < weights.size(); ++token) {
    out[count] = {uint32_t(token), weights[token]};
    count += weights[token] >= bound;
  }
  out.resize(count);
}

// What cuts one row.
class Cuts {
 public:
  Cuts(const Draws& draws, size_t row, size_t vocab, int64_t total, std::vector<float>& scratch)
      : min_p_(draws.min_p[row]), top_p_(draws.top_p[row]), total_(total), scratch_(scratch) {
    const auto k = size_t(std::max(draws.top_k[row], 0));
    top_k_ = k < vocab ? k : 0;
  }

  // A weight that is no larger than the least one that stays, without looking at each.
  float bound(const Kernels& kernels, Floats weights) const {
    float bound = min_p_;
    if (top_k_) bound = std::max(bound, kth_of_groups(kernels, weights));
    // Weights below this one have, all together, less mass than top_p may leave out.
    if (whole()) bound = float(double(total_ - needed(total_)) / double(weights.size())) / MASS_OF_ONE * MARGIN;
    return bound;
  }

  // The least weight that stays; `candidates` are all that are at least the bound.
  float least(const std::vector<Candidate>& candidates) const {
    float least = min_p_;
    if (top_k_ && candidates.size() >= top_k_) {
      keep(candidates, 0);
      least = std::max(least, kth_largest(scratch_, top_k_));
    }
    if (top_p_ < 1) {
      keep(candidates, least);
      least = least_reaching(scratch_, needed(whole() ? total_ : mass(scratch_.data(), scratch_.size())));
    }
    return least;
  }

 private:
  bool whole() const { return !top_k_ && min_p_ <= 0; }  // top_p counts every weight
  int64_t needed(int64_t total) const { return int64_t(std::ceil(double(top_p_) * double(total))); }

  // Each group has a weight as large as its largest, so the k-th largest of those is at most the k-th of all.
  float kth_of_groups(const Kernels& kernels, Floats weights) const {
    scratch_.clear();
    for (size_t first = 0; first < weights.size(); first += GROUP)
      scratch_.push_back(kernels.highest(weights.data() + first, std::min(GROUP, weights.size() - first)));
    return top_k_ <= scratch_.size() ? kth_largest(scratch_, top_k_) : 0.0f;
  }

  void keep(const std::vector<Candidate>& candidates, float least) const {
    scratch_.clear();
    for (const auto& candidate : candidates)
      if (candidate.weight >= least) scratch_.push_back(candidate.weight);
  }

  float min_p_, top_p_;
  size_t top_k_;  // 0: off
  int64_t total_;
  std::vector<float>& scratch_;
};

// The n largest, the first of equal ones first.
std::vector<Candidate> largest(Floats values, size_t n) {
  std::vector<Candidate> best;
  const auto larger = [](const Candidate& a, const Candidate& b) { return a.weight > b.weight; };
  for (size_t token = 0; n && token < values.size(); ++token) {
    if (best.size() == n && !(values[token] > best.back().weight)) continue;
    if (best.size() == n) best.pop_back();
    const Candidate next = {uint32_t(token), values[token]};
    best.insert(std::upper_bound(best.begin(), best.end(), next, larger), next);
  }
  return best;
}

// Most words of a mask are all or nothing.
void keep_allowed(Ints allow, std::span<float> logits) {
  for (size_t first = 0; first < logits.size(); first += 32) {
    const auto bits = uint32_t(allow[first / 32]);
    if (bits == ~uint32_t(0)) continue;
    const size_t size = std::min(size_t(32), logits.size() - first);
    float* part = logits.data() + first;
    for (size_t i = 0; i < size; ++i) part[i] = bits >> i & 1 ? part[i] : BANNED;
  }
}

void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

bool ascends(Ints values) {
  return std::adjacent_find(values.begin(), values.end(), std::greater_equal()) == values.end() &&
         (values.empty() || values.front() >= 0);
}

void check_starts(Ints start, size_t edits, size_t values) {
  require(start.size() == edits + 1 && std::is_sorted(start.begin(), start.end()) && start.front() == 0 &&
              size_t(start.back()) == values,
          "every edit needs a place in each of the flat arrays");
}

template <class T>
std::span<const T> piece(std::span<const T> values, Ints start, size_t e) {
  return values.subspan(size_t(start[e]), size_t(start[e + 1] - start[e]));
}

template <class T>
void grow(std::vector<T>& values, size_t size) {
  if (values.size() < size) values.resize(size);
}

}  // namespace

// ---- edits ----

std::vector<Edit> edits_of(const EditArrays& arrays, const Bitmasks& masks) {
  const size_t count = arrays.rows.size();
  require(arrays.repetition.size() == count, "every edit needs one repetition penalty");
  require(arrays.add_ids.size() == arrays.add_values.size(), "an edit adds one value for each id");
  check_starts(arrays.seen_start, count, arrays.seen.size());
  check_starts(arrays.add_start, count, arrays.add_ids.size());
  check_starts(arrays.ban_start, count, arrays.ban.size());
  require(ascends(arrays.rows) && ascends(masks.rows), "edits and masks come in the order of their rows, each row once");
  require(masks.words.size() == masks.rows.size() * masks.width, "every constrained row needs a mask");
  std::vector<Edit> edits;
  for (size_t e = 0, m = 0; e < count || m < masks.rows.size();) {
    const bool edited = e < count && (m == masks.rows.size() || arrays.rows[e] <= masks.rows[m]);
    const bool masked = m < masks.rows.size() && (e == count || masks.rows[m] <= arrays.rows[e]);
    Edit& edit = edits.emplace_back();
    edit.row = size_t(edited ? arrays.rows[e] : masks.rows[m]);
    if (edited) {
      edit.seen = piece(arrays.seen, arrays.seen_start, e);
      edit.repetition = arrays.repetition[e];
      edit.add_ids = piece(arrays.add_ids, arrays.add_start, e);
      edit.add_values = piece(arrays.add_values, arrays.add_start, e);
      edit.ban = piece(arrays.ban, arrays.ban_start, e++);
    }
    if (masked) edit.allow = masks.words.subspan(m++ * masks.width, masks.width);
  }
  return edits;
}

// ---- one step's draws ----

void Sampler::prepare(const Draws& draws, const std::vector<Edit>& edits, size_t rows, size_t vocab, unsigned workers) {
  rows_ = rows;
  vocab_ = vocab;
  parts_ = (vocab + PART - 1) / PART;
  check(draws, edits);
  draws_ = draws;
  edits_ = edits;
  edited_.assign(rows, false);
  for (const auto& edit : edits) edited_[edit.row] = true;
  bool any = !edits.empty();
  for (size_t row = 0; row < rows; ++row) any |= this->draws(row);
  if (any) grow(scratch_, rows * vocab);
  grow(highest_, rows * parts_);
  grow(mass_, rows * parts_);
  grow(tokens_, rows);
  grow(logprobs_, rows);
  candidates_.resize(workers);
  weights_.resize(workers);
}

void Sampler::check(const Draws& draws, const std::vector<Edit>& edits) const {
  for (size_t size : {draws.target.size(), draws.temperature.size(), draws.top_p.size(), draws.top_k.size(),
                      draws.min_p.size(), draws.seed.size(), draws.logprobs.size()})
    require(size == rows_, "every sampled position needs one of each sampling number");
  for (int32_t target : draws.target)
    require(target < 0 || size_t(target) < vocab_, "a target is outside the vocabulary");
  for (const auto& edit : edits) {
    require(edit.row < rows_, "an edit of no sampled position");
    require(edit.allow.empty() || edit.allow.size() == (vocab_ + 31) / 32, "a mask has a bit for each token");
    for (Ints ids : {edit.seen, edit.add_ids, edit.ban}) check_ids(ids);
  }
}

void Sampler::check_ids(Ints ids) const {
  for (int32_t id : ids) require(id >= 0 && size_t(id) < vocab_, "an edited token is outside the vocabulary");
}

std::vector<Logprob> Sampler::logprobs() const {
  std::vector<Logprob> asked;
  for (size_t row = 0; row < rows_; ++row)
    if (draws_.logprobs[row] >= 0) asked.push_back(logprobs_[row]);
  return asked;
}

// ---- phases ----

std::vector<Phase> Sampler::phases(int logits) {
  const auto of = [logits](const Frame& frame) -> const Buffer& { return frame.buffers[size_t(logits)]; };
  const Phase edit = {
      [this](const Frame&) { return rows_ ? edits_.size() : 0; },
      [=, this](const Frame& frame, size_t chunk, unsigned) { apply(of(frame), edits_[chunk]); },
  };
  const Phase peak = {
      [this](const Frame&) { return rows_ * parts_; },
      [=, this](const Frame& frame, size_t chunk, unsigned) {
        const float* from = source(of(frame), chunk / parts_) + chunk % parts_ * PART;
        highest_[chunk] = frame.kernels.highest(from, part_size(chunk % parts_));
      },
  };
  const Phase weights = {
      [this](const Frame&) {
        for (size_t row = 0; row < rows_; ++row)
          if (draws(row)) return rows_ * parts_;
        return size_t(0);
      },
      [=, this](const Frame& frame, size_t chunk, unsigned) {
        if (draws(chunk / parts_)) weigh(frame, of(frame), chunk / parts_, chunk % parts_);
      },
  };
  const Phase pick = {
      [this](const Frame&) { return rows_; },
      [=, this](const Frame& frame, size_t row, unsigned worker) {
        tokens_[row] = choose(frame, of(frame), row, worker);
        if (draws_.logprobs[row] >= 0) logprobs_[row] = logprob(frame, of(frame).row(row), row, weights_[worker]);
      },
  };
  return {edit, peak, weights, pick};
}

size_t Sampler::part_size(size_t part) const { return std::min(PART, vocab_ - part * PART); }

float Sampler::highest(size_t row) const {
  const float* parts = highest_.data() + row * parts_;
  return *std::max_element(parts, parts + parts_);
}

void Sampler::apply(const Buffer& logits, const Edit& edit) {
  float* row = scratch(edit.row);
  std::copy_n(logits.row(edit.row), vocab_, row);
  for (int32_t id : edit.seen) row[id] = row[id] > 0 ? row[id] / edit.repetition : row[id] * edit.repetition;
  for (size_t i = 0; i < edit.add_ids.size(); ++i) row[edit.add_ids[i]] += edit.add_values[i];
  for (int32_t id : edit.ban) row[id] = BANNED;
  if (!edit.allow.empty()) keep_allowed(edit.allow, {row, vocab_});
}

void Sampler::weigh(const Frame& frame, const Buffer& logits, size_t row, size_t part) {
  float* weights = scratch(row) + part * PART;
  frame.kernels.weigh(source(logits, row) + part * PART, part_size(part), draws_.temperature[row], highest(row), weights);
  mass_[row * parts_ + part] = mass(weights, part_size(part));
}

// ---- one row ----

int32_t Sampler::choose(const Frame& frame, const Buffer& logits, size_t row, unsigned worker) {
  if (draws_.target[row] >= 0) return draws_.target[row];
  if (!std::isfinite(highest(row))) return NO_TOKEN;
  return draws(row) ? draw(frame, row, worker) : most_likely(source(logits, row), row);
}

int32_t Sampler::most_likely(const float* logits, size_t row) const {
  const float* parts = highest_.data() + row * parts_;
  const size_t part = size_t(std::max_element(parts, parts + parts_) - parts);
  const float* first = logits + part * PART;
  return int32_t(std::find(first, first + part_size(part), parts[part]) - logits);
}

int32_t Sampler::draw(const Frame& frame, size_t row, unsigned worker) {
  const int64_t* parts = mass_.data() + row * parts_;
  const int64_t total = std::accumulate(parts, parts + parts_, int64_t(0));
  const bool cut = draws_.min_p[row] > 0 || draws_.top_k[row] > 0 || draws_.top_p[row] < 1;
  return cut ? draw_cut(frame, row, total, worker) : draw_uncut(row, total);
}

int32_t Sampler::draw_uncut(size_t row, int64_t total) {
  int64_t left = spread(draws_.seed[row], total);
  const int64_t* part = mass_.data() + row * parts_;
  const float* weight = scratch(row);
  for (; left >= *part; weight += PART) left -= *part++;
  for (; left >= mass(*weight); ++weight) left -= mass(*weight);
  return int32_t(weight - scratch(row));
}

int32_t Sampler::draw_cut(const Frame& frame, size_t row, int64_t total, unsigned worker) {
  const Cuts cuts(draws_, row, vocab_, total, weights_[worker]);
  auto& candidates = candidates_[worker];
  gather({scratch(row), vocab_}, cuts.bound(frame.kernels, {scratch(row), vocab_}), candidates);
  const float least = cuts.least(candidates);
  std::erase_if(candidates, [least](const Candidate& candidate) { return candidate.weight < least; });
  const auto add = [](int64_t sum, const Candidate& candidate) { return sum + mass(candidate.weight); };
  int64_t left = spread(draws_.seed[row], std::accumulate(candidates.begin(), candidates.end(), int64_t(0), add));
  size_t i = 0;
  for (; left >= mass(candidates[i].weight); ++i) left -= mass(candidates[i].weight);
  return int32_t(candidates[i].token);
}

Logprob Sampler::logprob(const Frame& frame, const float* logits, size_t row, std::vector<float>& weights) const {
  if (tokens_[row] == NO_TOKEN) return {0, 0.0, {}};
  const float highest = frame.kernels.highest(logits, vocab_);
  grow(weights, PART);
  double sum = 0;
  for (size_t part = 0; part < parts_; ++part) {
    frame.kernels.weigh(logits + part * PART, part_size(part), 1.0f, highest, weights.data());
    sum = std::accumulate(weights.begin(), weights.begin() + ptrdiff_t(part_size(part)), sum);
  }
  const double norm = double(highest) + std::log(sum);
  Logprob answer = {tokens_[row], double(logits[tokens_[row]]) - norm, {}};
  for (const Candidate& best : largest({logits, vocab_}, size_t(draws_.logprobs[row])))
    answer.top.push_back({int32_t(best.token), double(best.weight) - norm});
  return answer;
}

}  // namespace penstock
