// The part of Program that stores hidden states in KV blocks and loads them from there.
#include <algorithm>

#include "attention.h"
#include "program.h"
#include "require.h"

namespace penstock {

namespace {

constexpr size_t ROWS_TOGETHER = 8;

// The block table of the sequence that a token belongs to.
const int32_t* table_of(const Frame& frame, size_t token) {
  const Batch& batch = frame.batch;
  return batch.tables + (frame.hidden_group * batch.rows + row_of(batch, token)) * batch.table_width;
}

}  // namespace

void Program::store_hidden(size_t number, int x, size_t ahead) {
  const Buffer& from = at(x);
  hidden_->declare(number, from.width);
  uses_hidden_ = true;
  ahead_ = std::max(ahead_, ahead);
  const auto chunks = [x](const Frame& frame) { return (frame.rows(x) + ROWS_TOGETHER - 1) / ROWS_TOGETHER; };
  const auto run = [=, hidden = hidden_](const Frame& frame, size_t chunk, unsigned) {
    const Buffer& from = frame.buffers[size_t(x)];
    const size_t last = std::min((chunk + 1) * ROWS_TOGETHER, frame.rows(x));
    for (size_t r = chunk * ROWS_TOGETHER; r < last; ++r) {
      const size_t token = from.symbol == Symbol::T ? r : size_t(frame.batch.sampled[r]);
      hidden->store(number, table_of(frame, token), size_t(frame.batch.positions[token]) + ahead, from.row(r));
    }
  };
  phases_.push_back({chunks, run});
}

void Program::load_hidden(size_t number, int out) {
  hidden_->declare(number, at(out).width);
  at(out, Symbol::T, at(out).width);
  uses_hidden_ = true;
  each_row(out, [=, hidden = hidden_](const Frame& frame, size_t r) {
    hidden->load(number, table_of(frame, r), size_t(frame.batch.positions[r]), frame.buffers[size_t(out)].row(r));
  });
}

}  // namespace penstock
