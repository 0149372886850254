#include "lanes_avx2.h"
#include "kernels_body.h"

namespace penstock {
const Kernels& avx2_kernels() {
  static constexpr Kernels kernels = table(QuantizedFormats{});
  return kernels;
}
}  // namespace penstock
