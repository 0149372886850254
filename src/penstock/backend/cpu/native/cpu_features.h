// What this CPU has and the system lets programs use.
#pragma once

namespace penstock {

#if defined(__x86_64__)
bool has_carryless_product();  // and SSE 4.1
bool has_avx2();               // and FMA, F16C
bool has_avx512vnni();         // and F, BW, DQ, VL
#if defined(__linux__)
bool has_amx();  // and AVX-512's BF16; asks the system for tiles
#endif
#elif defined(__aarch64__)
bool has_crc32();
bool has_dot_product();  // 8-bit integers
#endif

}  // namespace penstock
