// Mixture of experts: each token is computed by the few experts that its router logits choose.
//
// Pairs of a token and one of its experts are permuted so that those of an expert are neighbours. Products then run
// over bands of pairs as they run over bands of rows. The results of a token's experts are added up in the order of
// their scores, so a token's result is the same in any batch.
#pragma once

#include <memory>
#include <vector>

#include "frame.h"
#include "weights.h"

namespace penstock {

// How router logits choose experts: see ExpertSpec in model/spec.py.
struct Routing {
  enum Scoring { SOFTMAX, SIGMOID, SOFTMAX_TOP_K };

  size_t count, top_k;
  Scoring scoring;
  bool renormalize;
  float scale;
  size_t groups, top_k_groups;
  bool by_two;              // a group's score is the sum of its two best, not its best one
  std::vector<float> bias;  // [count], or empty
  bool weigh_inputs = false;  // weights multiply the inputs of experts, not their outputs
  std::vector<float> expert_scale = {};  // [count], what an expert's weight is multiplied by; or empty

  void check() const;  // throws std::invalid_argument if the numbers do not fit each other
  size_t scratch_floats() const { return 2 * count + groups; }
  // The experts of a token, the best one first, and their weights.
  void route(const float* logits, float* scratch, uint32_t* experts, float* weights) const;

 private:
  void score(float* logits) const;
  void drop_other_groups(float* merits, float* scratch) const;
};

struct ExpertWeights {
  std::vector<std::shared_ptr<const Weight>> up, down;  // one for each expert; `up` has gate and up, or only up

  void check() const;  // throws std::invalid_argument unless all experts have one shape
  size_t width() const { return up.front()->width(); }
  size_t hidden() const { return down.front()->width(); }
  bool gated() const { return up.front()->rows() != hidden(); }
  bool gateable() const;
  bool trellis_up() const { return up.front()->trellis(); }  // EXL3; of one side all are, or none
  bool trellis_down() const { return down.front()->trellis(); }
};

// Up to BAND pairs of one expert.
struct Band {
  size_t expert, first, count;
};

// The permutation of token-expert pairs, and the buffers that experts compute in. Layers of one shape share it.
struct ExpertPermutation {
  ExpertPermutation(const Routing& routing, const ExpertWeights& experts, const Kernels& kernels);

  bool same_shape(const ExpertPermutation& other) const;
  void grow(size_t tokens);
  void permute(size_t tokens);  // finds a place for every pair of `experts`

  size_t count, top_k;
  std::vector<float> weights;             // [T][top_k]
  std::vector<uint32_t> experts, places;  // [T][top_k]
  std::vector<uint32_t> ends;             // the place after the last pair of each expert
  std::vector<Band> bands;
  Buffer inputs, ungated, hidden, outputs;  // a row for each place
  Buffer rotated;                           // inputs of EXL3 weights after the gate
};

struct Moe {
  int x, router_logits;
  Routing routing;
  ExpertWeights weights;
  Activation gate;  // or what stands in its place; null: products with `up` come out gated
  std::shared_ptr<ExpertPermutation> permutation;

  void add_up(size_t token, float* out) const;
};

// All phases before the results are added up. The scratch of each worker has room for Routing::scratch_floats().
std::vector<Phase> expert_phases(const std::shared_ptr<const Moe>& moe);

}  // namespace penstock
