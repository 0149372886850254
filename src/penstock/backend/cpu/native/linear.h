// x @ weight.T (+ bias), cut into chunks of panels and rows.
#pragma once

#include <memory>

#include "frame.h"
#include "weights.h"

namespace penstock {

Phase linear_phase(int x, std::shared_ptr<const Weight> weight, int out);

}  // namespace penstock
