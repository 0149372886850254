#include "dispatch.h"

#include <stdexcept>

namespace penstock {

const Kernels& generic_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512vnni_kernels();

namespace {

std::vector<Isa> detect() {
  std::vector<Isa> found;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx2 && avx512) found.push_back({"avx512vnni", &avx512vnni_kernels()});
  if (avx2) found.push_back({"avx2", &avx2_kernels()});
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
