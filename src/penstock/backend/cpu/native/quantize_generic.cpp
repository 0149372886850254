#include "quantize_coders.h"

namespace penstock {
std::span<const Coder> generic_coders() { return CODERS; }
}  // namespace penstock
