#include "experts.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "linear.h"
#include "require.h"

namespace penstock {

namespace {

constexpr size_t CHUNK_ROWS = 8;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

// Returns where the highest value is, the first of equal ones, and replaces it with minus infinity.
size_t take_highest(float* values, size_t size) {
  float* best = std::max_element(values, values + size);
  *best = LOWEST;
  return size_t(best - values);
}

void softmax(float* x, size_t size) {
  const float highest = *std::max_element(x, x + size);
  float sum = 0;
  for (size_t i = 0; i < size; ++i) sum += x[i] = std::exp(x[i] - highest);
  for (size_t i = 0; i < size; ++i) x[i] /= sum;
}

}  // namespace

// ---- routing ----

void Routing::check() const {
  require(top_k >= 1 && top_k <= count && count <= INT32_MAX,
          "a router chooses at least one expert and at most all of them");
  require(groups >= 1 && count % groups == 0 && top_k_groups >= 1 && top_k_groups <= groups &&
              top_k <= top_k_groups * (count / groups),
          "groups of experts must be equally large, and the chosen groups must hold enough experts");
  require(bias.empty() || bias.size() == count, "a router's bias has one value for each expert");
  require(expert_scale.empty() || expert_scale.size() == count, "every expert needs a scale, or none has one");
}

void Routing::score(float* logits) const {
  if (scoring == SOFTMAX) softmax(logits, count);
  if (scoring == SIGMOID)
    for (size_t i = 0; i < count; ++i) logits[i] = 1 / (1 + std::exp(-logits[i]));
}

void Routing::drop_other_groups(float* merits, float* scratch) const {
  const size_t size = count / groups;
  for (size_t g = 0; g < groups; ++g) {
    float best[2] = {LOWEST, LOWEST};
    for (size_t i = g * size; i < (g + 1) * size; ++i) {
      best[1] = std::max(best[1], std::min(best[0], merits[i]));
      best[0] = std::max(best[0], merits[i]);
    }
    scratch[g] = by_two && size > 1 ? best[0] + best[1] : best[0];
  }
  for (size_t i = 0; i < top_k_groups; ++i) take_highest(scratch, groups);
  for (size_t g = 0; g < groups; ++g)
    if (scratch[g] != LOWEST) std::fill_n(merits + g * size, size, LOWEST);
}

void Routing::route(const float* logits, float* scratch, uint32_t* experts, float* weights) const {
  float *scores = scratch, *merits = scratch + count;
  std::copy_n(logits, count, scores);
  score(scores);
  for (size_t i = 0; i < count; ++i) merits[i] = bias.empty() ? scores[i] : scores[i] + bias[i];
  if (top_k_groups < groups) drop_other_groups(merits, merits + count);
  for (size_t i = 0; i < top_k; ++i) {
    experts[i] = uint32_t(take_highest(merits, count));
    weights[i] = scores[experts[i]];
  }
  if (scoring == SOFTMAX_TOP_K) softmax(weights, top_k);
  float sum = 0;
  for (size_t i = 0; i < top_k; ++i) sum += weights[i];
  const float factor = renormalize ? scale / (sum + 1e-20f) : scale;
  for (size_t i = 0; i < top_k; ++i) weights[i] *= expert_scale.empty() ? factor : factor * expert_scale[experts[i]];
}

// ---- permutation ----

void ExpertWeights::check() const {
  require(!up.empty() && up.size() == down.size(), "experts need as many up weights as down weights");
  for (const auto& weights : {up, down})
    for (const auto& weight : weights)
      require(weight->trellis() == weights.front()->trellis() &&
                  (!weight->trellis() || weight->parts().size() == weights.front()->parts().size()),
              "the weights of all experts are EXL3, with as many parts, or none is");
  for (size_t i = 0; i < up.size(); ++i)
    require(up[i]->width() == width() && up[i]->rows() == (gated() ? 2 : 1) * hidden() &&
                down[i]->width() == hidden() && down[i]->rows() == width(),
            "all experts of a layer have one shape");
}

bool ExpertWeights::gateable() const {
  return std::all_of(up.begin(), up.end(), [](const auto& weight) { return weight->gateable(); });
}

namespace {

Buffer plain_rows(size_t width) { return {.symbol = Symbol::T, .width = width, .prepared = false}; }

Buffer rotated_rows(const Weight& weight) { return plain_rows(weight.parts().size() * weight.width()); }

Buffer rows_for(const std::vector<std::shared_ptr<const Weight>>& weights, const Kernels& kernels) {
  Buffer buffer = {.symbol = Symbol::T, .width = weights.front()->width(), .prepared = true};
  for (const auto& weight : weights) {
    buffer.coded |= weight->coded();
    buffer.bfloat |= weight->bfloat() && kernels.to_bfloats;
  }
  return buffer;
}

}  // namespace

ExpertPermutation::ExpertPermutation(const Routing& routing, const ExpertWeights& experts, const Kernels& kernels)
    : count(routing.count),
      top_k(routing.top_k),
      ends(routing.count),
      inputs(experts.trellis_up() ? rotated_rows(*experts.up.front()) : rows_for(experts.up, kernels)),
      ungated(plain_rows(experts.up.front()->rows())),
      hidden(rows_for(experts.down, kernels)),
      outputs(plain_rows(experts.width())),
      rotated(experts.trellis_down() ? rotated_rows(*experts.down.front()) : plain_rows(0)) {}

bool ExpertPermutation::same_shape(const ExpertPermutation& other) const {
  const auto same = [](const Buffer& a, const Buffer& b) {
    return a.width == b.width && a.coded == b.coded && a.bfloat == b.bfloat;
  };
  return count == other.count && top_k == other.top_k && same(inputs, other.inputs) && same(hidden, other.hidden) &&
         same(ungated, other.ungated) && same(rotated, other.rotated);
}

void ExpertPermutation::grow(size_t wanted) {
  const size_t room = std::bit_ceil(wanted) * top_k;
  if (room <= places.size()) return;
  for (auto* numbers : {&experts, &places}) numbers->resize(room);
  weights.resize(room);
  bands.reserve(room / BAND + std::min(room, count));
  for (Buffer* buffer : {&inputs, &ungated, &hidden, &outputs, &rotated}) buffer->make_room(room);
}

void ExpertPermutation::permute(size_t step_tokens) {
  const size_t taken = step_tokens * top_k;
  std::fill(ends.begin(), ends.end(), 0);
  for (size_t i = 0; i < taken; ++i) ++ends[experts[i]];
  bands.clear();
  for (size_t expert = 0, first = 0; expert < count; ++expert) {
    const size_t last = first + ends[expert];
    for (size_t at = first; at < last; at += BAND) bands.push_back({expert, at, std::min(BAND, last - at)});
    ends[expert] = uint32_t(first);
    first = last;
  }
  for (size_t i = 0; i < taken; ++i) places[i] = ends[experts[i]]++;
}

// ---- computing ----

void Moe::add_up(size_t token, float* out) const {
  const size_t width = permutation->outputs.width, first = token * routing.top_k;
  std::fill_n(out, width, 0.0f);
  for (size_t i = first; i < first + routing.top_k; ++i) {
    const float* given = permutation->outputs.row(permutation->places[i]);
    const float weight = routing.weigh_inputs ? 1.0f : permutation->weights[i];
    for (size_t j = 0; j < width; ++j) out[j] += weight * given[j];
  }
}

namespace {

template <class Count, class Each>
Phase in_chunks(Count count, Each each) {
  return {[count](const Frame& frame) { return divide_up(count(frame), CHUNK_ROWS); },
          [count, each](const Frame& frame, size_t chunk, unsigned worker) {
            const size_t last = std::min((chunk + 1) * CHUNK_ROWS, count(frame));
            for (size_t i = chunk * CHUNK_ROWS; i < last; ++i) each(frame, i, worker);
          }};
}

void copy_row(const Buffer& from, size_t token, bool codes_alone, const Buffer& to, size_t place) {
  if (!codes_alone) std::copy_n(from.row(token), from.width, to.row(place));
  if (to.coded) std::copy_n(from.code_row(token), from.width / BLOCK, to.code_row(place));
  if (to.bfloat) std::copy_n(from.bfloat_row(token), from.bfloat_stride(), to.bfloat_row(place));
}

// Gives an expert its token, multiplied by the weight that the expert has.
void copy_weighted_row(const Kernels& kernels, const Buffer& from, size_t token, float weight, const Buffer& to,
                       size_t place) {
  std::copy_n(from.row(token), from.width, to.row(place));
  kernels.scale(to.row(place), to.width, weight);
  to.prepare(kernels, place);
}

// Multiplies each band of pairs with its expert's weight.
Phase products(std::shared_ptr<const Moe> m, std::vector<std::shared_ptr<const Weight>> weights, bool gated,
               const Buffer& from, const Buffer& to) {
  const size_t panels = gated ? weights.front()->panels() / 2 : weights.front()->panels();
  const auto step = [m, gated, first = weights.front()](const Frame& frame) {
    return panels_at_once(*first, gated, m->permutation->bands.size(), frame.workers);
  };
  const auto chunks = [m, panels, step](const Frame& frame) {
    return m->permutation->bands.empty() ? 0 : m->permutation->bands.size() * divide_up(panels, step(frame));
  };
  const auto run = [=, weights = std::move(weights), &from, &to](const Frame& frame, size_t chunk, unsigned) {
    const size_t pieces = divide_up(panels, step(frame)), first = chunk % pieces * step(frame);
    const Band& band = m->permutation->bands[chunk / pieces];
    multiply(frame.kernels, from, band.first, band.count, *weights[band.expert], gated, first,
             std::min(first + step(frame), panels), to);
  };
  return {chunks, run};
}

}  // namespace

std::vector<Phase> expert_phases(const std::shared_ptr<const Moe>& m) {
  ExpertPermutation& permutation = *m->permutation;
  const auto tokens = [m](const Frame& frame) { return frame.rows(m->x); };
  const auto pairs = [m](const Frame& frame) { return frame.rows(m->x) * m->routing.top_k; };
  const bool codes_alone = m->weights.gateable();
  std::vector<Phase> phases;
  phases.push_back(in_chunks(tokens, [m, &permutation](const Frame& frame, size_t token, unsigned worker) {
    const size_t first = token * permutation.top_k;
    m->routing.route(frame.buffers[size_t(m->router_logits)].row(token), frame.scratch[worker].as<float>(),
                     &permutation.experts[first], &permutation.weights[first]);
  }));
  const auto permute = [tokens, &permutation](const Frame& frame, size_t, unsigned) {
    permutation.permute(tokens(frame));
  };
  phases.push_back({[tokens](const Frame& frame) { return std::min<size_t>(tokens(frame), 1); }, permute});
  phases.push_back(in_chunks(pairs, [m, &permutation, codes_alone](const Frame& frame, size_t pair, unsigned) {
    const Buffer& x = frame.buffers[size_t(m->x)];
    const size_t token = pair / permutation.top_k, place = permutation.places[pair];
    if (m->weights.trellis_up()) {
      rotate_inputs(frame.kernels, *m->weights.up[permutation.experts[pair]], x.row(token), permutation.inputs.row(place));
      if (m->routing.weigh_inputs)
        frame.kernels.scale(permutation.inputs.row(place), permutation.inputs.width, permutation.weights[pair]);
    } else if (m->routing.weigh_inputs) {
      copy_weighted_row(frame.kernels, x, token, permutation.weights[pair], permutation.inputs, place);
    } else {
      copy_row(x, token, codes_alone, permutation.inputs, place);
    }
  }));
  const Buffer& products_up = m->gate ? permutation.ungated : permutation.hidden;
  phases.push_back(products(m, m->weights.up, !m->gate, permutation.inputs, products_up));
  phases.push_back(in_chunks(pairs, [m, &permutation](const Frame& frame, size_t pair, unsigned) {
    const size_t place = permutation.places[pair], expert = permutation.experts[pair];
    float *ungated = permutation.ungated.row(place), *hidden = permutation.hidden.row(place);
    if (m->weights.trellis_up()) rotate_outputs(frame.kernels, *m->weights.up[expert], ungated);
    if (m->gate) m->gate(ungated, permutation.hidden.width, hidden);
    permutation.hidden.prepare(frame.kernels, place);
    if (m->weights.trellis_down())
      rotate_inputs(frame.kernels, *m->weights.down[expert], hidden, permutation.rotated.row(place));
  }));
  const bool rotates = m->weights.trellis_down();
  phases.push_back(products(m, m->weights.down, false, rotates ? permutation.rotated : permutation.hidden,
                            permutation.outputs));
  if (rotates)
    phases.push_back(in_chunks(pairs, [m, &permutation](const Frame& frame, size_t pair, unsigned) {
      rotate_outputs(frame.kernels, *m->weights.down[permutation.experts[pair]],
                     permutation.outputs.row(permutation.places[pair]));
    }));
  return phases;
}

}  // namespace penstock
