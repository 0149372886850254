// A mixture of experts: each token is computed by the few that its router's logits choose.
//
// Every pair of a token and one of its experts gets a seat, those of an expert beside each other, so that products run
// over bands of seats as they do over bands of rows. What a token's experts gave is added up in the order of their
// scores: its result is the same in any batch.
#pragma once

#include <memory>
#include <vector>

#include "frame.h"
#include "weights.h"

namespace penstock {

// model/spec.py says what these mean.
struct Choice {
  enum Scoring { SOFTMAX, SIGMOID, SOFTMAX_CHOSEN };

  size_t count, chosen;
  Scoring scoring;
  bool renormalize;
  float scale;
  size_t groups, chosen_groups;
  bool by_two;              // a group is as good as the sum of its two best, not as its best one
  std::vector<float> bias;  // [count], or empty

  void check() const;  // throws where numbers do not fit each other
  size_t scratch_floats() const { return 2 * count + groups; }
  // The experts of a token, the best one first, and their weights.
  void choose(const float* logits, float* scratch, uint32_t* experts, float* weights) const;

 private:
  void score(float* logits) const;
  void drop_other_groups(float* merits, float* scratch) const;
};

struct Bank {
  std::vector<std::shared_ptr<const Weight>> up, down;  // of each expert

  void check() const;  // throws unless all experts have one shape
  size_t width() const { return up.front()->width(); }
  size_t hidden() const { return down.front()->width(); }
  bool gateable() const;
};

// Up to BAND seats of one expert.
struct Band {
  size_t expert, first, count;
};

// Where experts compute; layers of one shape take turns.
struct Seating {
  Seating(const Choice& choice, const Bank& bank, const Kernels& kernels);

  bool same_shape(const Seating& other) const;
  void grow(size_t tokens);
  void seat(size_t tokens);  // every pair of `experts`

  size_t count, chosen;
  std::vector<float> weights;           // [T][chosen]
  std::vector<uint32_t> experts, seats;  // [T][chosen]
  std::vector<uint32_t> tokens;          // of each seat
  std::vector<uint32_t> ends;            // where each expert's seats do
  std::vector<Band> bands;
  Buffer inputs, ungated, hidden, outputs;  // a row for each seat
};

struct Mixture {
  int x, scores;
  Choice choice;
  Bank bank;
  void (*gate)(const float* x, size_t hidden, float* out);  // null: products with `up` come out gated
  std::shared_ptr<Seating> seating;

  void add_up(size_t token, float* out) const;
};

// All that comes before adding up. The scratch of each worker has room for a choice.
std::vector<Phase> expert_phases(const std::shared_ptr<const Mixture>& mixture);

}  // namespace penstock
