#include "lanes_avx512vnni.h"
#include "kernels_body.h"

namespace penstock {
const Kernels& avx512vnni_kernels() { return kernels; }
}  // namespace penstock
