// Large outputs on the CPU.
#pragma once
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tsr {

// An output this large comes fresh from the system: its first writes are page faults, which cost more than the data.
constexpr int64_t kFreshBytes = int64_t{32} << 20;

// Maps the whole pages of [memory, memory + bytes) in one call, just before they are written: cheaper than a fault per
// page. Only a hint: a system that does not know it faults as ever.
inline void map_pages(void* memory, int64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) & ~(kPage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
#else
  (void)memory;
  (void)bytes;
#endif
}

}  // namespace tsr
