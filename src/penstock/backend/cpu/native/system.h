// What the native code asks of the operating system: pages of memory, and reads from files. system_posix.cpp and
// system_windows.cpp have it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

constexpr size_t HUGE_BYTES = size_t(2) << 20;  // a huge page

// Zeroed pages that cost nothing until they are touched. All of these throw std::bad_alloc.
void* map_pages(size_t bytes);
void* map_huge_pages(size_t bytes);  // huge ones where the system has them; `bytes` is a multiple of HUGE_BYTES
void* map_shared(int file, uint64_t start, size_t bytes);  // maps a file, which grows if it is shorter; whole huge pages
void unmap_pages(void* data, size_t bytes);
void unmap_shared(void* data, size_t bytes);

// Reads at an offset, wherever the file stands; returns how many bytes there were: 0 at the end, below 0 on an error.
int64_t read_at(int file, void* data, size_t bytes, uint64_t offset);

}  // namespace penstock
