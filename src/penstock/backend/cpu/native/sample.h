// Choosing tokens from logits: the same tokens as the definition, backend/sample.py, without sorting.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "frame.h"

namespace penstock {

using Ints = std::span<const int32_t>;
using Floats = std::span<const float>;

// How to answer each of the S sampled positions: arrays of S.
struct Draws {
  Ints target;  // -1: sample; else score this token
  Floats temperature, top_p;
  Ints top_k;
  Floats min_p;
  std::span<const uint64_t> seed;
  Ints logprobs;  // -1: none; else how many alternatives
};

// The edits of a step as flat arrays, as LogitEdits in backend/base.py has them: edit e has seen[seen_start[e]] and so on,
// up to seen_start[e + 1].
struct EditArrays {
  Ints rows;
  Floats repetition;
  Ints seen, seen_start, add_ids;
  Floats add_values;
  Ints add_start, ban, ban_start;
};

// The tokens that grammars allow at some positions: words[i] belongs to rows[i].
struct Bitmasks {
  Ints rows;
  Ints words;  // [rows][width] a bit for each token, the lowest first
  size_t width;
};

// Changes to one row of logits: `seen` divided or multiplied by `repetition`, then sums, then bans, then all but `allow`.
struct Edit {
  size_t row;
  Ints seen;
  float repetition = 1;
  Ints add_ids;
  Floats add_values;
  Ints ban;
  Ints allow;  // a bit for each token, the lowest first; empty: all
};

// One edit for each row that has an edit or a mask; throws std::invalid_argument where the arrays do not fit together.
std::vector<Edit> edits_of(const EditArrays& arrays, const Bitmasks& masks);

struct Logprob {
  int32_t token;
  double logprob;
  std::vector<std::pair<int32_t, double>> top;
};

struct Candidate {
  uint32_t token;
  float weight;
};

class Sampler {
 public:
  // Takes one step's draws, which must outlive it, or none; throws std::invalid_argument.
  void prepare(const Draws& draws, const std::vector<Edit>& edits, size_t rows, size_t vocab, unsigned workers);
  void rest() { rows_ = 0; }

  std::vector<Phase> phases(int logits);  // they run after the phases that compute the logits

  std::vector<int32_t> tokens() const { return {tokens_.begin(), tokens_.begin() + ptrdiff_t(rows_)}; }
  std::vector<Logprob> logprobs() const;  // one per row with logprobs

 private:
  bool draws(size_t row) const { return draws_.target[row] < 0 && draws_.temperature[row] > 0; }
  size_t part_size(size_t part) const;
  float* scratch(size_t row) { return scratch_.data() + row * vocab_; }
  const float* source(const Buffer& logits, size_t row) { return edited_[row] ? scratch(row) : logits.row(row); }
  float highest(size_t row) const;

  void check(const Draws& draws, const std::vector<Edit>& edits) const;
  void check_ids(Ints ids) const;
  void apply(const Buffer& logits, const Edit& edit);
  void weigh(const Frame& frame, const Buffer& logits, size_t row, size_t part);
  int32_t most_likely(const float* logits, size_t row) const;
  int32_t choose(const Frame& frame, const Buffer& logits, size_t row, unsigned worker);
  int32_t draw(const Frame& frame, size_t row, unsigned worker);
  int32_t draw_uncut(size_t row, int64_t total);
  int32_t draw_cut(const Frame& frame, size_t row, int64_t total, unsigned worker);
  Logprob logprob(const Frame& frame, const float* logits, size_t row, std::vector<float>& weights) const;

  Draws draws_;
  std::vector<Edit> edits_;
  size_t rows_ = 0, vocab_ = 0, parts_ = 0;
  std::vector<bool> edited_;               // [row]
  std::vector<float> scratch_;             // [row][vocab] edited logits, then weights
  std::vector<float> highest_;             // [row][part]
  std::vector<int64_t> mass_;              // [row][part]
  std::vector<int32_t> tokens_;            // [row]
  std::vector<Logprob> logprobs_;          // [row]
  std::vector<std::vector<Candidate>> candidates_;  // index: worker
  std::vector<std::vector<float>> weights_;         // index: worker
};

}  // namespace penstock
