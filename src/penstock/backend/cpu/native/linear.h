// x @ weight.T (+ bias), cut into chunks of panels and rows.
#pragma once

#include <memory>

#include "frame.h"
#include "weights.h"

namespace penstock {

// `gated`: silu(x @ first half of the weight) * (x @ second half), for a weight that is gateable.
Phase linear_phase(int x, std::shared_ptr<const Weight> weight, int out, bool gated);

}  // namespace penstock
