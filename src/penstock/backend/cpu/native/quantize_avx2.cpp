#include "quantize_coders.h"

namespace penstock {
std::span<const Coder> avx2_coders() { return CODERS; }
}  // namespace penstock
