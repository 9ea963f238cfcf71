// Which instruction set the CPU loops use. Each family's loops are compiled once per level, in one translation unit, by
// isa_foreach.h; the family picks its table of functions by cpu_level() once, when the library is loaded.
#pragma once
#include <cstdint>

namespace tsr {

// In increasing order: a machine that has one has those before it. On other processors than x86-64 there is only
// kBaseline, which the compiler vectorises for the architecture's own minimum (NEON on aarch64).
enum class CpuLevel : int64_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// What the machine offers, or less where TORCHSPARSE_REC_CPU=baseline|avx2|avx512 asks for less.
CpuLevel cpu_level();

// The level's entry of a family's tables {baseline, avx2, avx512}; unavailable levels are never picked.
template <class Table>
const Table& pick_level(const Table& baseline, const Table& avx2, const Table& avx512) {
  switch (cpu_level()) {
    case CpuLevel::kAvx512:
      return avx512;
    case CpuLevel::kAvx2:
      return avx2;
    default:
      return baseline;
  }
}

}  // namespace tsr
