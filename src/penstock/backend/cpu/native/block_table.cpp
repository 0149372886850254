#include "block_table.h"

#include <algorithm>
#include <cstring>

namespace penstock {

namespace {

constexpr size_t LEAST = 1024;           // slots
constexpr size_t REPLICAS_PER_WORD = 32;  // two bits each

uint64_t first_word(const Digest& block) {
  uint64_t word;
  std::memcpy(&word, block.data(), sizeof word);
  return word;
}

unsigned shift_of(size_t replica) { return unsigned(2 * (replica % REPLICAS_PER_WORD)); }

}  // namespace

BlockTable::BlockTable() : slots_(LEAST * (KEY + 1)), capacity_(LEAST), width_(1) {}

bool BlockTable::empty(size_t at) const {
  const uint64_t* bits = slot(at) + KEY;
  return std::all_of(bits, bits + width_, [](uint64_t word) { return word == 0; });
}

// The slot of a block, or the empty one where it would be. A digest is as good as random: its bits are the hash.
size_t BlockTable::place(const Digest& block) const {
  size_t at = first_word(block) & (capacity_ - 1);
  while (std::memcmp(slot(at), block.data(), sizeof(Digest)) != 0 && !empty(at)) at = (at + 1) & (capacity_ - 1);
  return at;
}

std::span<const uint64_t> BlockTable::find(const Digest& block) const {
  const size_t at = place(block);
  if (empty(at)) return {};
  return {slot(at) + KEY, width_};
}

void BlockTable::set(size_t replica, const Digest& block, uint64_t bits) {
  const size_t word = replica / REPLICAS_PER_WORD;
  if (word >= width_) {
    if (!bits) return;
    rebuild(capacity_, word + 1);
  }
  size_t at = place(block);
  const bool added = empty(at);
  if (added) {
    if (!bits) return;
    if (2 * (used_ + 1) > capacity_) {
      rebuild(2 * capacity_, width_);
      at = place(block);
    }
    std::memcpy(slot(at), block.data(), sizeof(Digest));
    ++used_;
  }
  uint64_t& own = slot(at)[KEY + word];
  own = (own & ~(uint64_t(3) << shift_of(replica))) | bits << shift_of(replica);
  if (!added && empty(at)) remove(at);
}

// Empties a slot, and moves those back that are further from their place because of it.
void BlockTable::remove(size_t at) {
  const size_t mask = capacity_ - 1;
  size_t hole = at;
  for (size_t next = (hole + 1) & mask; !empty(next); next = (next + 1) & mask) {
    const size_t home = slot(next)[0] & mask;
    if (((next - home) & mask) < ((next - hole) & mask)) continue;
    std::copy_n(slot(next), stride(), slot(hole));
    hole = next;
  }
  std::fill_n(slot(hole), stride(), 0);
  --used_;
}

void BlockTable::clear(size_t replica) {
  const size_t word = replica / REPLICAS_PER_WORD;
  if (word >= width_) return;
  for (size_t at = 0; at < capacity_; ++at) slot(at)[KEY + word] &= ~(uint64_t(3) << shift_of(replica));
  rebuild(capacity_, width_);  // without the slots that are empty now
}

std::vector<std::pair<uint64_t, Digest>> BlockTable::held_by(size_t replica) const {
  std::vector<std::pair<uint64_t, Digest>> found;
  const size_t word = replica / REPLICAS_PER_WORD;
  if (word >= width_) return found;
  for (size_t at = 0; at < capacity_; ++at) {
    const uint64_t bits = slot(at)[KEY + word] >> shift_of(replica) & 3;
    if (!bits) continue;
    found.push_back({bits, {}});
    std::memcpy(found.back().second.data(), slot(at), sizeof(Digest));
  }
  return found;
}

void BlockTable::rebuild(size_t capacity, size_t width) {
  std::vector<uint64_t> before(capacity * (KEY + width));
  std::swap(slots_, before);
  const size_t old_stride = stride(), old_width = width_, old_capacity = capacity_;
  capacity_ = capacity;
  width_ = width;
  used_ = 0;
  for (size_t at = 0; at < old_capacity; ++at) {
    const uint64_t* from = before.data() + at * old_stride;
    if (std::all_of(from + KEY, from + KEY + old_width, [](uint64_t bits) { return bits == 0; })) continue;
    Digest block;
    std::memcpy(block.data(), from, sizeof block);
    std::copy_n(from, KEY + old_width, slot(place(block)));
    ++used_;
  }
}

}  // namespace penstock
