#include "memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <new>

namespace penstock {

namespace {

constexpr size_t HUGE_BYTES = size_t(2) << 20;

size_t whole_pages(size_t bytes) { return (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES; }

void* reserve(size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  return found;
}

void* reserve_huge(size_t bytes) {
  auto* start = static_cast<std::byte*>(reserve(bytes + HUGE_BYTES));
  const size_t before = -reinterpret_cast<uintptr_t>(start) % HUGE_BYTES;
  if (before) munmap(start, before);
  if (before < HUGE_BYTES) munmap(start + before + bytes, HUGE_BYTES - before);
#if defined(MADV_HUGEPAGE)
  madvise(start + before, bytes, MADV_HUGEPAGE);
#endif
  return start + before;
}

}  // namespace

Memory::Memory(size_t bytes, Pages pages) : bytes_(bytes) {
  if (bytes == 0) return;
  if (pages == HUGE_PAGES) bytes_ = whole_pages(bytes);
  data_ = pages == HUGE_PAGES ? reserve_huge(bytes_) : reserve(bytes);
}

Memory::Memory(size_t bytes, MemoryFile& file) : bytes_(bytes) {
  if (bytes == 0) return;
  const size_t start = whole_pages(file.end);
  struct stat found;
  if (fstat(file.descriptor, &found) != 0) throw std::bad_alloc();
  if (size_t(found.st_size) < start + bytes && ftruncate(file.descriptor, off_t(start + bytes)) != 0)
    throw std::bad_alloc();
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor, off_t(start));
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  data_ = mapped;
  file.end = start + bytes;
}

Memory::~Memory() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace penstock
