#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
// The next one needs the types of the first.
#include <io.h>

#include <algorithm>
#include <new>

#include "system.h"

namespace penstock {

namespace {

constexpr size_t MOST_AT_ONCE = size_t(1) << 30;  // bytes that one call may read

HANDLE handle_of(int file) { return reinterpret_cast<HANDLE>(_get_osfhandle(file)); }

}  // namespace

void* map_pages(size_t bytes) {
  void* found = VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
  if (!found) throw std::bad_alloc();
  return found;
}

void* map_huge_pages(size_t bytes) { return map_pages(bytes); }  // those are for users with a privilege

void* map_shared(int file, uint64_t start, size_t bytes) {
  const uint64_t end = start + bytes;  // a mapping beyond the file's end makes it longer
  const HANDLE mapping = CreateFileMappingW(handle_of(file), nullptr, PAGE_READWRITE, DWORD(end >> 32), DWORD(end), nullptr);
  if (!mapping) throw std::bad_alloc();
  void* mapped = MapViewOfFile(mapping, FILE_MAP_WRITE, DWORD(start >> 32), DWORD(start), bytes);
  CloseHandle(mapping);  // the view keeps it
  if (!mapped) throw std::bad_alloc();
  return mapped;
}

void unmap_pages(void* data, size_t) { VirtualFree(data, 0, MEM_RELEASE); }

void unmap_shared(void* data, size_t) { UnmapViewOfFile(data); }

int64_t read_at(int file, void* data, size_t bytes, uint64_t offset) {
  OVERLAPPED place = {};
  place.Offset = DWORD(offset);
  place.OffsetHigh = DWORD(offset >> 32);
  DWORD got = 0;
  if (ReadFile(handle_of(file), data, DWORD(std::min(bytes, MOST_AT_ONCE)), &got, &place)) return got;
  return GetLastError() == ERROR_HANDLE_EOF ? 0 : -1;
}

}  // namespace penstock
