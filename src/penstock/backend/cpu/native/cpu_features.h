// What this CPU has and the system lets programs use.
#pragma once

namespace penstock {

#if defined(__x86_64__)
bool has_carryless_product();  // with SSE 4.1
bool has_avx2();               // with FMA and F16C
bool has_avx512vnni();         // with F, BW, DQ and VL
#if defined(__linux__)
bool has_amx();  // with AVX-512's BF16; asks the system for tiles
#endif
#elif defined(__aarch64__)
bool has_crc32();
bool has_dot_product();  // of 8-bit integers
#endif

}  // namespace penstock
