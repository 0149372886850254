#include "adapters.h"

#include <algorithm>

#include "frame.h"
#include "linear.h"
#include "require.h"

namespace penstock {

namespace {

constexpr size_t CHUNK_BYTES = 8192;  // small, so that every worker gets a part of thin matrices

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

size_t panels_at_once(const Weight& weight) {
  return std::max<size_t>(CHUNK_BYTES * weight.panels() / std::max<size_t>(weight.bytes(), 1), 1);
}

size_t chunks_of(const Weight& weight) { return divide_up(weight.panels(), panels_at_once(weight)); }

// Rows that a thin matrix is multiplied with, and where the products go.
struct ThinRows {
  Rows x;
  bool middles;
  float* y;
  size_t y_stride, count;
};

void multiply_thin(const Kernels& kernels, const Weight& weight, size_t chunk, const ThinRows& rows, bool add) {
  const size_t step = panels_at_once(weight), last = std::min((chunk + 1) * step, weight.panels());
  const Run run = weight.panels(chunk * step, last - chunk * step);
  kernels.product[size_t(run.part->format)]({
      .panels = run.data,
      .partners = nullptr,
      .panel_bytes = run.part->panel_bytes,
      .width = weight.width(),
      .x = static_cast<const std::byte*>(rows.x.data),
      .x_stride = rows.x.stride,
      .rows = rows.count,
      .middles = rows.middles,
      .bias = nullptr,
      .y = rows.y + run.column,
      .y_stride = rows.y_stride,
      .columns = run.columns,
      .table = run.part->table,
      .factor = run.part->factor,
      .grouping = run.part->grouping,
      .add = add,
  });
}

const std::vector<AdapterRun>& runs_of(const Frame& frame, int buffer) {
  return frame.adapter_runs[size_t(frame.buffers[size_t(buffer)].symbol)];
}

struct RankProducts {
  int x;
  const Weight* weight;

  size_t chunks(const Frame& frame) const {
    size_t total = 0;
    for (const AdapterRun& run : runs_of(frame, x))
      if (const LowRank* found = run.adapter->find(weight)) total += chunks_of(*found->a);
    return total;
  }

  void run(const Frame& frame, size_t chunk) const {
    for (const AdapterRun& run : runs_of(frame, x)) {
      const LowRank* found = run.adapter->find(weight);
      if (!found) continue;
      const size_t chunks = chunks_of(*found->a);
      if (chunk < chunks) return multiply(frame, run, *found, chunk);
      chunk -= chunks;
    }
  }

  void multiply(const Frame& frame, const AdapterRun& run, const LowRank& change, size_t chunk) const {
    const Buffer& from = frame.buffers[size_t(x)];
    const Rows rows = rows_for(frame.kernels, from, change.a->panels(0, 1).part->format, run.first);
    multiply_thin(frame.kernels, *change.a, chunk,
                  {rows, from.middles(), frame.rank_row(run.first), frame.rank_stride, run.count}, false);
  }
};

struct AddedProducts {
  int x, out;
  const Weight* weight;

  size_t chunks(const Frame& frame) const {
    size_t total = 0;
    for (const AdapterRun& run : runs_of(frame, x))
      if (const LowRank* found = run.adapter->find(weight))
        for (const LowRankPart& part : found->parts) total += chunks_of(*part.b);
    return total;
  }

  void run(const Frame& frame, size_t chunk) const {
    for (const AdapterRun& run : runs_of(frame, x)) {
      const LowRank* found = run.adapter->find(weight);
      if (!found) continue;
      for (const LowRankPart& part : found->parts) {
        const size_t chunks = chunks_of(*part.b);
        if (chunk < chunks) return add(frame, run, part, chunk);
        chunk -= chunks;
      }
    }
  }

  void add(const Frame& frame, const AdapterRun& run, const LowRankPart& part, size_t chunk) const {
    const Buffer& to = frame.buffers[size_t(out)];
    const Rows ranks = {frame.rank_row(run.first) + part.rank, frame.rank_stride * sizeof(float)};
    multiply_thin(frame.kernels, *part.b, chunk,
                  {ranks, false, to.row(run.first) + part.column, to.width, run.count}, true);
  }
};

}  // namespace

void Adapter::add(std::shared_ptr<const Weight> weight, std::shared_ptr<const Weight> a, const Parts& parts) {
  require(weight && a && a->width() == weight->width(), "a thin matrix takes rows as wide as its weight does");
  require(!a->bfloat() && (weight->coded() || !a->coded()),
          "a thin matrix is F32 or F16; beside a quantized weight the first of two may be quantized, too");
  require(!updates_.contains(weight.get()), "a weight is changed once by an adapter");
  LowRank change = {weight, a, {}};
  size_t rank = 0;
  for (const auto& [column, b] : parts) {
    require(b && !b->coded() && !b->bfloat(), "the second of two thin matrices is F32 or F16");
    require(column <= weight->rows() && b->rows() <= weight->rows() - column, "a part lies outside its weight");
    change.parts.push_back({column, rank, b});
    rank += b->width();
    bytes_ += b->bytes();
  }
  require(rank == a->rows(), "the ranks of the parts add up to the rows of what makes them");
  bytes_ += a->bytes();
  most_ranks_ = std::max(most_ranks_, rank);
  updates_.emplace(weight.get(), std::move(change));
}

bool changes(const Frame& frame, int x, const Weight* weight) {
  const auto& runs = runs_of(frame, x);
  return std::any_of(runs.begin(), runs.end(), [&](const AdapterRun& run) { return run.adapter->find(weight); });
}

std::pair<Phase, Phase> adapter_phases(int x, const Weight* weight, int out) {
  const RankProducts ranks = {x, weight};
  const AddedProducts added = {x, out, weight};
  return {{[ranks](const Frame& frame) { return ranks.chunks(frame); },
           [ranks](const Frame& frame, size_t chunk, unsigned) { ranks.run(frame, chunk); }},
          {[added](const Frame& frame) { return added.chunks(frame); },
           [added](const Frame& frame, size_t chunk, unsigned) { added.run(frame, chunk); }}};
}

}  // namespace penstock
