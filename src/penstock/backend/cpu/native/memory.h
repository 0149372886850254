// Zeroed pages that cost nothing until they are touched.
#pragma once

#include <cstddef>
#include <utility>

namespace penstock {

// A file that is nowhere but in memory. Processes map it one after the other: what one has written, the next one finds.
struct MemoryFile {
  int descriptor;
  size_t end;  // bytes taken so far
};

class Memory {
 public:
  enum Pages { ORDINARY, HUGE_PAGES };  // huge ones where the system has them: fewer address translations

  Memory() = default;
  explicit Memory(size_t bytes, Pages pages = ORDINARY);  // throws std::bad_alloc
  Memory(size_t bytes, MemoryFile& file);  // takes the next bytes of a file, and makes it longer if it is too short
  ~Memory();
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(shared_, other.shared_);
    return *this;
  }

  template <class T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool shared_ = false;  // mapped from a file
};

}  // namespace penstock
