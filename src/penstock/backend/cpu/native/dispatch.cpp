#include "dispatch.h"

#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace penstock {

const Kernels& generic_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512vnni_kernels();
const Kernels& amx_kernels();
const Kernels& amx_int8_kernels();
const Kernels& neon_kernels();

namespace {

#if defined(__x86_64__) && defined(__linux__)
// Tiles are kept from programs that have not asked for them: their registers make a thread's state large.
bool has_amx() {
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, ALL = BF16 | TILE | INT8;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & ALL) != ALL || !__builtin_cpu_supports("avx512bf16")) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#elif defined(__aarch64__)
bool has_dot_product() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every Mac with such a CPU
#endif
}
#endif

std::vector<Isa> detect() {
  std::vector<Isa> found;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
#if defined(__linux__)
  if (avx2 && avx512 && has_amx()) {
    found.push_back({"amx", &amx_kernels()});
    found.push_back({"amx-int8", &amx_int8_kernels()});
  }
#endif
  if (avx2 && avx512) found.push_back({"avx512vnni", &avx512vnni_kernels()});
  if (avx2) found.push_back({"avx2", &avx2_kernels()});
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
