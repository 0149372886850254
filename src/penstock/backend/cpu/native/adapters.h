// Adapters (LoRA): thin matrices whose products are added to those of packed weights, by each row's adapter.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weights.h"

namespace penstock {

struct Frame;
struct Phase;

// y[columns from `column` on] += b . (values of a . x from `rank` on)
struct LowRankPart {
  size_t column, rank;
  std::shared_ptr<const Weight> b;
};

// The change of one weight: the matrices `a` of all parts are one, so that x is read once.
struct LowRank {
  std::shared_ptr<const Weight> weight, a;
  std::vector<LowRankPart> parts;
};

class Adapter {
 public:
  // (first row of the weight, b) of each part. They share the rows of `a` out among them in this order.
  using Parts = std::vector<std::pair<size_t, std::shared_ptr<const Weight>>>;

  void add(std::shared_ptr<const Weight> weight, std::shared_ptr<const Weight> a, const Parts& parts);
  const LowRank* find(const Weight* weight) const {
    const auto found = updates_.find(weight);
    return found == updates_.end() ? nullptr : &found->second;
  }
  const std::unordered_map<const Weight*, LowRank>& updates() const { return updates_; }
  size_t bytes() const { return bytes_; }
  size_t most_ranks() const { return most_ranks_; }

 private:
  std::unordered_map<const Weight*, LowRank> updates_;
  size_t bytes_ = 0, most_ranks_ = 0;
};

// Consecutive rows of one adapter, at most BAND.
struct AdapterRun {
  const Adapter* adapter;
  size_t first, count;
};

// Whether an adapter of some row of x changes the weight.
bool changes(const Frame& frame, int x, const Weight* weight);

// Two phases that add what the rows' adapters change about out = x . weight: first all a . x, then all b . that.
std::pair<Phase, Phase> adapter_phases(int x, const Weight* weight, int out);

}  // namespace penstock
