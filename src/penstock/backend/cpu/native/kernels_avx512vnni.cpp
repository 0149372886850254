#include "lanes_avx512vnni.h"
#include "kernels_body.h"

namespace penstock {
const Kernels& avx512vnni_kernels() {
  static constexpr Kernels kernels = table(QuantizedFormats{});
  return kernels;
}
}  // namespace penstock
