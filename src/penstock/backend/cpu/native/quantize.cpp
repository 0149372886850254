#include "quantize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "half.h"

namespace penstock {

namespace {

constexpr float LARGEST = 65504;  // float16's maximum

std::span<const Coder> coders([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx2") return avx2_coders();
  if (isa != "generic") return avx512_coders();
#endif
  return generic_coders();
}

const Coder& coder_of(const std::string& name, const std::string& isa) {
  for (const Coder& coder : coders(choose(isa).name))
    if (name == coder.name) return coder;
  throw std::invalid_argument("no native quantizer for the format " + name);
}

struct Plain {
  const char* name;
  size_t bytes;
  void (*read)(const uint8_t* from, size_t count, float* out);
};

template <float (*from)(uint16_t)>
void read_words(const uint8_t* bytes, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) {
    uint16_t word;
    std::memcpy(&word, bytes + 2 * i, 2);
    out[i] = from(word);
  }
}

void read_floats(const uint8_t* bytes, size_t count, float* out) { std::memcpy(out, bytes, 4 * count); }

constexpr Plain PLAIN[] = {
    {"F32", 4, read_floats}, {"F16", 2, read_words<from_half>}, {"BF16", 2, read_words<from_bfloat>}};

const Plain& plain_of(const std::string& name) {
  for (const Plain& plain : PLAIN)
    if (name == plain.name) return plain;
  throw std::invalid_argument("values of the format " + name + " are not plain");
}

bool all_sound(const float* values, size_t count) {
  bool sound = true;
  for (size_t i = 0; i < count; ++i) sound &= std::fabs(values[i]) <= LARGEST;
  return sound;
}

}  // namespace

bool quantize(const std::string& from, std::span<const uint8_t> values, const std::string& to, std::span<uint8_t> out,
              unsigned threads, const std::string& isa) {
  const Plain& plain = plain_of(from);
  const Coder& coder = coder_of(to, isa);
  const size_t count = values.size() / plain.bytes, blocks = count / coder.values;
  if (count % coder.values || values.size() % plain.bytes || out.size() != blocks * coder.bytes)
    throw std::invalid_argument(std::to_string(values.size()) + " bytes of " + from + " cannot become " +
                                std::to_string(out.size()) + " of " + to);
  constexpr size_t PIECE = 256;  // runs of blocks that a thread takes at a time
  std::atomic<size_t> next = 0;
  std::atomic<bool> sound = true;
  const auto work = [&] {
    std::vector<float> plain_values(coder.blocks * coder.values);
    std::vector<uint8_t> coded(coder.blocks * coder.bytes);
    for (size_t piece = next++; piece * PIECE * coder.blocks < blocks; piece = next++)
      for (size_t run = piece * PIECE; run < (piece + 1) * PIECE && run * coder.blocks < blocks; ++run) {
        const size_t first = run * coder.blocks, some = std::min(coder.blocks, blocks - first);
        std::fill(plain_values.begin(), plain_values.end(), 0.0f);
        plain.read(values.data() + first * coder.values * plain.bytes, some * coder.values, plain_values.data());
        if (!all_sound(plain_values.data(), plain_values.size())) {
          sound = false;
          continue;
        }
        std::fill(coded.begin(), coded.end(), 0);
        coder.encode(plain_values.data(), coded.data());
        std::memcpy(out.data() + first * coder.bytes, coded.data(), some * coder.bytes);
      }
  };
  std::vector<std::thread> helpers;
  const size_t pieces = blocks / (PIECE * coder.blocks) + 1;
  for (size_t i = 1; i < std::min<size_t>(threads, pieces); ++i) helpers.emplace_back(work);
  work();
  for (auto& helper : helpers) helper.join();
  return sound;
}

}  // namespace penstock
