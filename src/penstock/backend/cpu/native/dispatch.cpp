#include "dispatch.h"

#include <stdexcept>

#include "cpu_features.h"

namespace penstock {

const Kernels& generic_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512vnni_kernels();
const Kernels& amx_kernels();
const Kernels& amx_int8_kernels();
const Kernels& neon_kernels();

namespace {

std::vector<Isa> detect() {
  std::vector<Isa> found;
#if defined(__x86_64__)
  if (has_avx2() && has_avx512vnni()) {
#if defined(__linux__)
    if (has_amx()) {
      found.push_back({"amx", &amx_kernels()});
      found.push_back({"amx-int8", &amx_int8_kernels()});
    }
#endif
    found.push_back({"avx512vnni", &avx512vnni_kernels()});
  }
  if (has_avx2()) found.push_back({"avx2", &avx2_kernels()});
#elif defined(__aarch64__)
  if (has_dot_product()) found.push_back({"neon", &neon_kernels()});
#endif
  found.push_back({"generic", &generic_kernels()});
  return found;
}

}  // namespace

const std::vector<Isa>& isas() {
  static const std::vector<Isa> found = detect();
  return found;
}

const Isa& choose(const std::string& name) {
  if (name == "auto") return isas().front();
  for (const auto& isa : isas())
    if (isa.name == name) return isa;
  throw std::invalid_argument("this CPU or build has no instruction set " + name);
}

}  // namespace penstock
