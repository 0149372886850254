// The part of Program that deals with adapters.
#include <algorithm>
#include <bit>
#include <utility>

#include "linear.h"
#include "program.h"
#include "require.h"

namespace penstock {

namespace {

constexpr int32_t NO_ADAPTER = -1;
constexpr size_t MAX_ADAPTERS = 1 << 16;

// The phase, in steps with `runs`. In others it does nothing.
Phase when(Phase phase, std::function<bool(const Frame&)> runs) {
  phase.chunks = [chunks = std::move(phase.chunks), runs = std::move(runs)](const Frame& frame) {
    return runs(frame) ? chunks(frame) : 0;
  };
  return phase;
}

}  // namespace

void Program::add_updates(int x, const Weight* weight, int out) {
  auto [ranks, added] = adapter_phases(x, weight, out);
  phases_.push_back(std::move(ranks));
  phases_.push_back(std::move(added));
}

// A gate is computed together with its product, unless an adapter changes that product first: then the product is made
// in a buffer of its own. Both ways compute every value in the same steps.
void Program::gated_linear(int x, std::shared_ptr<const Weight> weight, int out) {
  const Weight* key = weight.get();
  const auto changed = [x, key](const Frame& frame) { return changes(frame, x, key); };
  const auto unchanged = [changed](const Frame& frame) { return !changed(frame); };
  const int wide = wide_buffer(at(out).symbol, weight->rows());
  phases_.push_back(when(linear_phase(x, weight, out, true), unchanged));
  if (at(out).prepared) {
    prepare_rows(out);
    phases_.back() = when(std::move(phases_.back()), unchanged);
  }
  phases_.push_back(when(linear_phase(x, weight, wide, false), changed));
  add_updates(x, key, wide);
  act_and_mul(wide, out, "silu");
  phases_.back() = when(std::move(phases_.back()), changed);
}

int Program::wide_buffer(Symbol symbol, size_t width) {
  const auto same = [&](int buffer) { return at(buffer).symbol == symbol && at(buffer).width == width; };
  const auto found = std::find_if(wide_.begin(), wide_.end(), same);
  if (found != wide_.end()) return *found;
  wide_.push_back(buffer(symbol == Symbol::T ? "T" : "S", width, false));
  return wide_.back();
}

void Program::load_adapter(size_t slot, std::shared_ptr<const Adapter> adapter) {
  const std::lock_guard lock(running_);
  require(slot < MAX_ADAPTERS, "an adapter's slot is a number from 0 to 2^16 - 1");
  for (const auto& [weight, change] : adapter->updates())
    require(std::find(adaptable_.begin(), adaptable_.end(), weight) != adaptable_.end(),
            "an adapter changes a weight that no product of this program has");
  if (slot >= adapters_.size()) adapters_.resize(slot + 1);
  require(!adapters_[slot], "there is an adapter in slot " + std::to_string(slot));
  adapters_[slot] = std::move(adapter);
}

void Program::drop_adapter(size_t slot) {
  const std::lock_guard lock(running_);
  require(slot < adapters_.size() && adapters_[slot], "there is no adapter in slot " + std::to_string(slot));
  adapters_[slot] = nullptr;
}

void Program::choose_adapters(std::vector<int32_t> slots) {
  const std::lock_guard lock(running_);
  chosen_ = std::move(slots);
}

void Program::find_adapters(const Step& step) {
  const auto chosen = std::exchange(chosen_, {});
  for (auto& runs : frame_.adapter_runs) runs.clear();
  if (chosen.empty()) return;
  require(chosen.size() == step.slots.size(), "every row needs an adapter's slot, or -1");
  size_t ranks = 0, sampled = 0;
  for (size_t row = 0; row < chosen.size(); ++row) {
    const auto first = size_t(step.row_start[row]), last = size_t(step.row_start[row + 1]);
    const size_t first_sampled = sampled;
    while (sampled < step.sampled.size() && size_t(step.sampled[sampled]) < last) ++sampled;
    if (chosen[row] == NO_ADAPTER) continue;
    const auto slot = size_t(chosen[row]);
    require(slot < adapters_.size() && adapters_[slot], "there is no adapter in slot " + std::to_string(chosen[row]));
    const Adapter* adapter = adapters_[slot].get();
    ranks = std::max(ranks, adapter->most_ranks());
    add_run(frame_.adapter_runs[size_t(Symbol::T)], adapter, first, last);
    add_run(frame_.adapter_runs[size_t(Symbol::S)], adapter, first_sampled, sampled);
  }
  frame_.rank_stride = ranks;
  const size_t bytes = step.tokens.size() * ranks * sizeof(float);
  if (frame_.ranks.bytes() < bytes) frame_.ranks = Memory(std::bit_ceil(bytes));
}

// Rows of one adapter that follow each other are computed together, which changes no row's result.
void Program::add_run(std::vector<AdapterRun>& runs, const Adapter* adapter, size_t first, size_t last) {
  if (!runs.empty() && runs.back().adapter == adapter && runs.back().first + runs.back().count == first) {
    const size_t more = std::min(BAND - runs.back().count, last - first);
    runs.back().count += more;
    first += more;
  }
  for (; first < last; first += runs.back().count) runs.push_back({adapter, first, std::min(BAND, last - first)});
}

}  // namespace penstock
