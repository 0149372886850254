#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace penstock {

#if defined(__x86_64__)

namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
  Registers found;
  __get_cpuid_count(leaf, subleaf, &found.a, &found.b, &found.c, &found.d);
  return found;
}

constexpr unsigned bits(auto... places) { return (0u | ... | (1u << places)); }

constexpr bool all(unsigned found, unsigned wanted) { return (found & wanted) == wanted; }

// Whether the system saves these registers when it switches threads. The compilers' own question about a CPU's features
// needs a library that clang does not link on Windows.
bool saves(unsigned registers) {
  constexpr unsigned OSXSAVE = bits(27);
  if (!all(cpuid(1).c, OSXSAVE)) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return all(low, registers);
}

constexpr unsigned SSE = bits(1), AVX = bits(2), MASKS = bits(5), WIDE = bits(6, 7);

}  // namespace

bool has_carryless_product() {
  constexpr int PCLMUL = 1, SSE41 = 19;
  return all(cpuid(1).c, bits(PCLMUL, SSE41));
}

bool has_avx2() {
  constexpr int FMA = 12, HAS_AVX = 28, F16C = 29, AVX2 = 5;
  return saves(SSE | AVX) && all(cpuid(1).c, bits(FMA, HAS_AVX, F16C)) && all(cpuid(7).b, bits(AVX2));
}

bool has_avx512vnni() {
  constexpr int F = 16, DQ = 17, BW = 30, VL = 31, VNNI = 11;
  return saves(SSE | AVX | MASKS | WIDE) && all(cpuid(7).b, bits(F, DQ, BW, VL)) && all(cpuid(7).c, bits(VNNI));
}

#if defined(__linux__)
// Tiles are kept from programs that have not asked for them: their registers make a thread's state large.
bool has_amx() {
  constexpr int BF16 = 22, TILE = 24, INT8 = 25, AVX512BF16 = 5;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  if (!all(cpuid(7).d, bits(BF16, TILE, INT8)) || !all(cpuid(7, 1).a, bits(AVX512BF16))) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

#elif defined(__aarch64__)

bool has_crc32() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_CRC32;
#elif defined(__APPLE__)
  return true;  // every Mac with such a CPU
#else
  return false;
#endif
}

bool has_dot_product() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
  return true;  // every Mac with such a CPU
#else
  return false;
#endif
}

#endif

}  // namespace penstock
