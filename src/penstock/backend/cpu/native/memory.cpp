#include "memory.h"

#include "system.h"

namespace penstock {

namespace {

size_t whole_pages(size_t bytes) { return (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES; }

}  // namespace

Memory::Memory(size_t bytes, Pages pages) : bytes_(bytes) {
  if (bytes == 0) return;
  if (pages == HUGE_PAGES) bytes_ = whole_pages(bytes);
  data_ = pages == HUGE_PAGES ? map_huge_pages(bytes_) : map_pages(bytes);
}

Memory::Memory(size_t bytes, MemoryFile& file) : bytes_(bytes), shared_(true) {
  if (bytes == 0) return;
  const size_t start = whole_pages(file.end);
  data_ = map_shared(file.descriptor, start, bytes);
  file.end = start + bytes;
}

Memory::~Memory() {
  if (data_) shared_ ? unmap_shared(data_, bytes_) : unmap_pages(data_, bytes_);
}

}  // namespace penstock
