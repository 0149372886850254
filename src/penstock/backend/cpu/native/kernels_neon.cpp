#include "lanes_neon.h"
#include "kernels_body.h"

namespace penstock {
const Kernels& neon_kernels() {
  static constexpr Kernels kernels = table(QuantizedFormats{});
  return kernels;
}
}  // namespace penstock
