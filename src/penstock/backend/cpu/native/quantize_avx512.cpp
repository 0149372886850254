#include "quantize_coders.h"

namespace penstock {
std::span<const Coder> avx512_coders() { return CODERS; }
}  // namespace penstock
