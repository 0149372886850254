#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace penstock {

Memory::Memory(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    throw std::bad_alloc();
  }
}

Memory::~Memory() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace penstock
