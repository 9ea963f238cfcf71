// Words of texts, in the device's 32-bit words.
#pragma once
#include "../cuda.h"

namespace tsr {

__device__ inline uint64_t pair(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }

// The word that begins `bits` after the start of low; at most 32.
__device__ inline uint32_t word_at(uint32_t low, uint32_t high, uint32_t bits) {
  return static_cast<uint32_t>(pair(low, high) >> bits);
}

}  // namespace tsr
