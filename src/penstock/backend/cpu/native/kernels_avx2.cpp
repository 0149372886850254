#include "lanes_avx2.h"
#include "kernels_body.h"

namespace penstock {
const Kernels& avx2_kernels() { return kernels; }
}  // namespace penstock
