#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <new>

#include "system.h"

namespace penstock {

void* map_pages(size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  return found;
}

void* map_huge_pages(size_t bytes) {
  auto* start = static_cast<std::byte*>(map_pages(bytes + HUGE_BYTES));
  const size_t before = -reinterpret_cast<uintptr_t>(start) % HUGE_BYTES;
  if (before) munmap(start, before);
  if (before < HUGE_BYTES) munmap(start + before + bytes, HUGE_BYTES - before);
#if defined(MADV_HUGEPAGE)
  madvise(start + before, bytes, MADV_HUGEPAGE);
#endif
  return start + before;
}

void* map_shared(int file, uint64_t start, size_t bytes) {
  struct stat found;
  if (fstat(file, &found) != 0) throw std::bad_alloc();
  if (uint64_t(found.st_size) < start + bytes && ftruncate(file, off_t(start + bytes)) != 0) throw std::bad_alloc();
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, off_t(start));
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  return mapped;
}

void unmap_pages(void* data, size_t bytes) { munmap(data, bytes); }

void unmap_shared(void* data, size_t bytes) { munmap(data, bytes); }

int64_t read_at(int file, void* data, size_t bytes, uint64_t offset) { return pread(file, data, bytes, off_t(offset)); }

}  // namespace penstock
