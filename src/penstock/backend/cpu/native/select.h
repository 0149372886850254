// Selects the positions that sparse attention attends to (DSA), by an index of one small key for each position.
#pragma once

#include "attention.h"
#include "frame.h"

namespace penstock {

struct Index {
  size_t layer, heads, dim, top_k;
  int angles;        // buffer [T][cos of each pair, sin of each pair]; -1: nothing is rotated
  bool interleaved;  // pairs are (2i, 2i + 1) or (i, i + pairs)

  size_t scratch_floats() const { return heads * (dim + SPAN); }  // per worker
};

// Makes room for the scores of a step whose attention is planned.
void plan_index(Frame& frame);

Phase store_index_phase(const Index& index, int k);  // rotates index keys and writes them to the cache
// Scores positions, where a step has so few tokens that workers share each; else the next phase does it.
Phase score_phase(const Index& index, int q, int weights);
Phase select_phase(const Index& index, int q, int weights, int out);  // writes each token's positions, ascending

}  // namespace penstock
