#include "packed_file.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <thread>

#include "system.h"

namespace penstock {

namespace {

constexpr size_t PIECES_IN_TURN = 16;  // per thread: two threads seldom touch the same huge page first

struct Piece {
  std::byte* data;
  size_t bytes;
  uint64_t offset;
};

uint64_t mixed(uint64_t sum, uint64_t word) { return std::rotl((sum ^ word) * 0x9e3779b97f4a7c15, 29); }

bool read_whole(int file, const Piece& piece) {
  for (size_t done = 0; done < piece.bytes;) {
    const int64_t got = read_at(file, piece.data + done, piece.bytes - done, piece.offset + done);
    if (got <= 0) return false;
    done += size_t(got);
  }
  return true;
}

std::vector<Piece> pieces_of(const std::vector<Weight*>& weights, uint64_t offset) {
  std::vector<Piece> pieces;
  for (Weight* weight : weights) {
    for (size_t at = 0; at < weight->bytes(); at += PIECE_BYTES)
      pieces.push_back({weight->packed().get() + at, std::min(PIECE_BYTES, weight->bytes() - at), offset + at});
    offset += weight->bytes();
  }
  return pieces;
}

}  // namespace

uint64_t checksum(std::span<const std::byte> bytes) {
  uint64_t a = 1, b = 2, c = 3, d = 4;  // in parallel: a single one would wait for its own products
  const auto take = [&](const std::byte* four) {
    uint64_t words[4];
    std::memcpy(words, four, sizeof words);
    a = mixed(a, words[0]);
    b = mixed(b, words[1]);
    c = mixed(c, words[2]);
    d = mixed(d, words[3]);
  };
  constexpr size_t STEP = 32;
  const size_t left = bytes.size() % STEP;
  for (size_t at = 0; at < bytes.size() - left; at += STEP) take(bytes.data() + at);
  if (left) {
    std::byte last[STEP] = {};
    std::memcpy(last, bytes.data() + bytes.size() - left, left);
    take(last);
  }
  return mixed(mixed(mixed(mixed(bytes.size(), a), b), c), d);
}

bool read_packed(int file, uint64_t offset, const std::vector<Weight*>& weights, uint64_t expected, unsigned threads) {
  const std::vector<Piece> pieces = pieces_of(weights, offset);
  std::vector<uint64_t> sums(pieces.size());
  std::atomic<size_t> next = 0;
  std::atomic<bool> whole = true;
  const auto work = [&] {
    for (size_t i = next.fetch_add(PIECES_IN_TURN); i < pieces.size() && whole; i = next.fetch_add(PIECES_IN_TURN))
      for (size_t j = i; j < std::min(i + PIECES_IN_TURN, pieces.size()); ++j) {
        if (!read_whole(file, pieces[j])) whole = false;
        sums[j] = checksum({pieces[j].data, pieces[j].bytes});
      }
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < std::min<size_t>(threads, pieces.size()); ++i) helpers.emplace_back(work);
  work();
  for (auto& helper : helpers) helper.join();
  if (whole && checksum(std::as_bytes(std::span(sums))) == expected) return true;
  for (const Piece& piece : pieces) std::memset(piece.data, 0, piece.bytes);
  return false;
}

}  // namespace penstock
