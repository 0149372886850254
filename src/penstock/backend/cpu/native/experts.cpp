#include "experts.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "linear.h"

namespace penstock {

namespace {

constexpr size_t CHUNK_ROWS = 8;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

// Where the highest value is, of equal ones the first; it becomes nothing.
size_t take_highest(float* values, size_t size) {
  float* best = std::max_element(values, values + size);
  *best = NOTHING;
  return size_t(best - values);
}

void soften(float* x, size_t size) {
  const float highest = *std::max_element(x, x + size);
  float sum = 0;
  for (size_t i = 0; i < size; ++i) sum += x[i] = std::exp(x[i] - highest);
  for (size_t i = 0; i < size; ++i) x[i] /= sum;
}

}  // namespace

// ---- choosing ----

void Choice::check() const {
  require(chosen >= 1 && chosen <= count && count <= INT32_MAX, "as many experts are chosen as there are, at most");
  require(groups >= 1 && count % groups == 0 && chosen_groups >= 1 && chosen_groups <= groups &&
              chosen <= chosen_groups * (count / groups),
          "groups of experts must be equal, and the chosen ones must hold enough");
  require(bias.empty() || bias.size() == count, "a bias of the choice has one value for each expert");
}

void Choice::score(float* logits) const {
  if (scoring == SOFTMAX) soften(logits, count);
  if (scoring == SIGMOID)
    for (size_t i = 0; i < count; ++i) logits[i] = 1 / (1 + std::exp(-logits[i]));
}

void Choice::drop_other_groups(float* merits, float* scratch) const {
  const size_t size = count / groups;
  for (size_t g = 0; g < groups; ++g) {
    float best[2] = {NOTHING, NOTHING};
    for (size_t i = g * size; i < (g + 1) * size; ++i) {
      best[1] = std::max(best[1], std::min(best[0], merits[i]));
      best[0] = std::max(best[0], merits[i]);
    }
    scratch[g] = by_two && size > 1 ? best[0] + best[1] : best[0];
  }
  for (size_t i = 0; i < chosen_groups; ++i) take_highest(scratch, groups);
  for (size_t g = 0; g < groups; ++g)
    if (scratch[g] != NOTHING) std::fill_n(merits + g * size, size, NOTHING);
}

void Choice::choose(const float* logits, float* scratch, uint32_t* experts, float* weights) const {
  float *scores = scratch, *merits = scratch + count;
  std::copy_n(logits, count, scores);
  score(scores);
  for (size_t i = 0; i < count; ++i) merits[i] = bias.empty() ? scores[i] : scores[i] + bias[i];
  if (chosen_groups < groups) drop_other_groups(merits, merits + count);
  for (size_t i = 0; i < chosen; ++i) {
    experts[i] = uint32_t(take_highest(merits, count));
    weights[i] = scores[experts[i]];
  }
  if (scoring == SOFTMAX_CHOSEN) soften(weights, chosen);
  float sum = 0;
  for (size_t i = 0; i < chosen; ++i) sum += weights[i];
  const float factor = renormalize ? scale / (sum + 1e-20f) : scale;
  for (size_t i = 0; i < chosen; ++i) weights[i] *= factor;
}

// ---- seating ----

void Bank::check() const {
  require(!up.empty() && up.size() == down.size(), "experts need as many weights up as down");
  for (size_t i = 0; i < up.size(); ++i)
    require(up[i]->width() == width() && up[i]->rows() == 2 * hidden() && down[i]->width() == hidden() &&
                down[i]->rows() == width(),
            "all experts of a layer have one shape");
}

bool Bank::gateable() const {
  return std::all_of(up.begin(), up.end(), [](const auto& weight) { return weight->gateable(); });
}

namespace {

Buffer rows_for(const std::vector<std::shared_ptr<const Weight>>& weights, const Kernels& kernels) {
  Buffer buffer = {.symbol = Symbol::T, .width = weights.front()->width(), .prepared = true};
  for (const auto& weight : weights) {
    buffer.coded |= weight->coded();
    buffer.bfloat |= weight->bfloat() && kernels.to_bfloats;
  }
  return buffer;
}

Buffer plain_rows(size_t width) { return {.symbol = Symbol::T, .width = width, .prepared = false}; }

}  // namespace

Seating::Seating(const Choice& choice, const Bank& bank, const Kernels& kernels)
    : count(choice.count),
      chosen(choice.chosen),
      ends(choice.count),
      inputs(rows_for(bank.up, kernels)),
      ungated(plain_rows(2 * bank.hidden())),
      hidden(rows_for(bank.down, kernels)),
      outputs(plain_rows(bank.width())) {}

bool Seating::same_shape(const Seating& other) const {
  const auto same = [](const Buffer& a, const Buffer& b) {
    return a.width == b.width && a.coded == b.coded && a.bfloat == b.bfloat;
  };
  return count == other.count && chosen == other.chosen && same(inputs, other.inputs) && same(hidden, other.hidden);
}

void Seating::grow(size_t wanted) {
  const size_t room = std::bit_ceil(wanted) * chosen;
  if (room <= tokens.size()) return;
  for (auto* numbers : {&experts, &seats, &tokens}) numbers->resize(room);
  weights.resize(room);
  bands.reserve(room / BAND + std::min(room, count));
  for (Buffer* buffer : {&inputs, &ungated, &hidden, &outputs}) buffer->make_room(room);
}

void Seating::seat(size_t step_tokens) {
  const size_t taken = step_tokens * chosen;
  std::fill(ends.begin(), ends.end(), 0);
  for (size_t i = 0; i < taken; ++i) ++ends[experts[i]];
  bands.clear();
  for (size_t expert = 0, first = 0; expert < count; ++expert) {
    const size_t last = first + ends[expert];
    for (size_t at = first; at < last; at += BAND) bands.push_back({expert, at, std::min(BAND, last - at)});
    ends[expert] = uint32_t(first);
    first = last;
  }
  for (size_t i = 0; i < taken; ++i) {
    seats[i] = ends[experts[i]]++;
    tokens[seats[i]] = uint32_t(i / chosen);
  }
}

// ---- computing ----

void Mixture::add_up(size_t token, float* out) const {
  const size_t width = seating->outputs.width, first = token * choice.chosen;
  std::fill_n(out, width, 0.0f);
  for (size_t i = first; i < first + choice.chosen; ++i) {
    const float* given = seating->outputs.row(seating->seats[i]);
    const float weight = seating->weights[i];
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

void take_seat(const Buffer& from, size_t token, bool codes_alone, const Buffer& to, size_t seat) {
  if (!codes_alone) std::copy_n(from.row(token), from.width, to.row(seat));
  if (to.coded) std::copy_n(from.code_row(token), from.width / BLOCK, to.code_row(seat));
  if (to.bfloat) std::copy_n(from.bfloat_row(token), from.bfloat_stride(), to.bfloat_row(seat));
}

// Each band of seats times its expert's weight.
Phase products(std::shared_ptr<const Mixture> m, std::vector<std::shared_ptr<const Weight>> weights, bool gated,
               const Buffer& from, const Buffer& to) {
  const size_t panels = gated ? weights.front()->panels() / 2 : weights.front()->panels();
  const auto step = [m, gated, first = weights.front()](const Frame& frame) {
    return panels_at_once(*first, gated, m->seating->bands.size(), frame.workers);
  };
  const auto chunks = [m, panels, step](const Frame& frame) {
    return m->seating->bands.empty() ? 0 : m->seating->bands.size() * divide_up(panels, step(frame));
  };
  const auto run = [=, weights = std::move(weights), &from, &to](const Frame& frame, size_t chunk, unsigned) {
    const size_t pieces = divide_up(panels, step(frame)), first = chunk % pieces * step(frame);
    const Band& band = m->seating->bands[chunk / pieces];
    multiply(frame.kernels, from, band.first, band.count, *weights[band.expert], gated, first,
             std::min(first + step(frame), panels), to);
  };
  return {chunks, run};
}

}  // namespace

std::vector<Phase> expert_phases(const std::shared_ptr<const Mixture>& m) {
  Seating& seating = *m->seating;
  const auto tokens = [m](const Frame& frame) { return frame.rows(m->x); };
  const auto seats = [m](const Frame& frame) { return frame.rows(m->x) * m->choice.chosen; };
  const bool codes_alone = m->bank.gateable();
  std::vector<Phase> phases;
  phases.push_back(in_chunks(tokens, [m, &seating](const Frame& frame, size_t token, unsigned worker) {
    const size_t first = token * seating.chosen;
    m->choice.choose(frame.buffers[size_t(m->scores)].row(token), frame.scratch[worker].as<float>(),
                     &seating.experts[first], &seating.weights[first]);
  }));
  phases.push_back({[tokens](const Frame& frame) { return std::min<size_t>(tokens(frame), 1); },
                    [tokens, &seating](const Frame& frame, size_t, unsigned) { seating.seat(tokens(frame)); }});
  phases.push_back(in_chunks(seats, [m, &seating, codes_alone](const Frame& frame, size_t seat, unsigned) {
    take_seat(frame.buffers[size_t(m->x)], seating.tokens[seat], codes_alone, seating.inputs, seat);
  }));
  phases.push_back(products(m, m->bank.up, !m->gate, seating.inputs, m->gate ? seating.ungated : seating.hidden));
  phases.push_back(in_chunks(seats, [m, &seating](const Frame& frame, size_t seat, unsigned) {
    if (m->gate) m->gate(seating.ungated.row(seat), seating.hidden.width, seating.hidden.row(seat));
    seating.hidden.prepare(frame.kernels, seat);
  }));
  phases.push_back(products(m, m->bank.down, false, seating.hidden, seating.outputs));
  return phases;
}

}  // namespace penstock
