// What one core can do at most: bytes read from memory a second, and 8-bit multiplies and adds a second where the CPU has
// an instruction for their dot product. The shortest of many tries counts. `products.py --peaks` compiles and runs it.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include <sys/mman.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

template <class Work>
double seconds_of(Work work) {
  const auto begun = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// Reads a piece at a time, so that other processes disturb few of the tries, and all pieces before one again, so that no
// cache has it.
void print_read_speed() {
  constexpr size_t PIECES = 256, PIECE_WORDS = size_t(1) << 17, AHEAD_WORDS = 256, PASSES = 8;
  constexpr size_t BYTES = PIECES * PIECE_WORDS * 8;
  void* memory = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;
  madvise(memory, BYTES, MADV_HUGEPAGE);  // as weights have them
  std::memset(memory, 1, BYTES);
  std::vector<double> best(PIECES, 1e9);
  volatile uint64_t result = 0;
  for (size_t pass = 0; pass < PASSES; ++pass)
    for (size_t piece = 0; piece < PIECES; ++piece) {
      const uint64_t* words = static_cast<const uint64_t*>(memory) + piece * PIECE_WORDS;
      best[piece] = std::min(best[piece], seconds_of([&] {
        uint64_t sums[8] = {};
        for (size_t i = 0; i < PIECE_WORDS; i += 8) {
          __builtin_prefetch(words + i + AHEAD_WORDS, 0, 2);
          for (size_t j = 0; j < 8; ++j) sums[j] += words[i + j];
        }
        for (uint64_t sum : sums) result = result + sum;
      }));
    }
  double seconds = 0;
  for (double one : best) seconds += one;
  std::printf("one core reads %.1f GB/s from memory", double(BYTES) / seconds / 1e9);
}

#if defined(__AVX512VNNI__)
void print_int8_speed() {
  constexpr int ROUNDS = 20000, CHAINS = 8;
  double seconds = 1e9;
  for (int tries = 0; tries < 200; ++tries)
    seconds = std::min(seconds, seconds_of([] {
      const __m512i codes = _mm512_set1_epi8(3);
      __m512i sums[CHAINS] = {};
      for (int i = 0; i < ROUNDS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < CHAINS; ++j) {
          sums[j] = _mm512_dpbusd_epi32(sums[j], codes, codes);
          asm volatile("" : "+v"(sums[j]));
        }
    }));
  std::printf(", and does %.3f 10^12 int8 operations a second", 128.0 * ROUNDS * CHAINS / seconds / 1e12);
}
#else
void print_int8_speed() {}
#endif

}  // namespace

int main() {
  print_read_speed();
  print_int8_speed();
  std::printf("\n");
}
