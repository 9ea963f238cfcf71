// What hash_lanes.h needs and may not include, since it is compiled for several instruction sets: the intrinsics and,
// for AVX2, tables.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's AVX-512 functions read variables that they leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

namespace tsr {

// AVX2 has no compress and expand: for every set of 4 lanes, the 32-bit halves that a permutation takes.
struct LaneMoves {
  alignas(32) uint32_t compress[16][8] = {};
  alignas(32) uint32_t expand[16][8] = {};
  alignas(32) uint32_t selected[16][8] = {};  // all ones in the lanes of the set

  constexpr LaneMoves() {
    for (uint32_t set = 0; set < 16; ++set) {
      uint32_t rank = 0;
      for (uint32_t lane = 0; lane < 4; ++lane) {
        if ((set >> lane & 1) == 0) continue;
        for (uint32_t half = 0; half < 2; ++half) {
          compress[set][2 * rank + half] = 2 * lane + half;
          expand[set][2 * lane + half] = 2 * rank + half;
          selected[set][2 * lane + half] = ~uint32_t{0};
        }
        ++rank;
      }
    }
  }
};
[[maybe_unused]] constexpr LaneMoves kMoves;

}  // namespace tsr
