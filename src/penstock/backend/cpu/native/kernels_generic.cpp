#include "lanes_generic.h"
#include "kernels_body.h"

namespace penstock {
const Kernels& generic_kernels() {
  static constexpr Kernels kernels = table(QuantizedFormats{});
  return kernels;
}
}  // namespace penstock
