#include "lanes_generic.h"
#include "kernels_body.h"

namespace penstock {
const Kernels& generic_kernels() { return kernels; }
}  // namespace penstock
