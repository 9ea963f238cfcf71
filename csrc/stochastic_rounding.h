// Rounding a float32 to one of the two half-precision neighbours, the nearer one more often: the mean is the number.
#pragma once
#include <cstring>

#include "dispatch.h"

namespace tsr {

// 32 bits that depend on all of x's: Chris Wellons' lowbias32.
TSR_HOST_DEVICE TSR_ALWAYS_INLINE uint32_t scrambled(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// The generator of one row at one step: its bits are a function of (seed, step, row, column), and of nothing else.
struct RowBits {
  uint32_t key0, key1;

  TSR_HOST_DEVICE RowBits(int64_t seed, int64_t step, int64_t row) {
    // splitmix64's finalizer, over the three numbers in turn.
    uint64_t x = 0;
    for (const int64_t part : {seed, step, row}) {
      x = (x ^ static_cast<uint64_t>(part)) + 0x9E3779B97F4A7C15ull;
      x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
      x = (x ^ x >> 27) * 0x94D049BB133111EBull;
      x ^= x >> 31;
    }
    key0 = static_cast<uint32_t>(x);
    key1 = static_cast<uint32_t>(x >> 32);
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE uint32_t of(uint32_t column) const {
    return scrambled(scrambled(column ^ key0) + key1);
  }
};

TSR_HOST_DEVICE TSR_ALWAYS_INLINE uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

TSR_HOST_DEVICE TSR_ALWAYS_INLINE float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// One of the two neighbours of x among the numbers that T can hold, as a float32; x itself where T can hold it. An
// infinity or NaN stays one.
template <class T>
TSR_HOST_DEVICE TSR_ALWAYS_INLINE float rounded_by(float x, uint32_t random) {
  const uint32_t sign = float_bits(x) & 0x80000000u, size = float_bits(x) & 0x7fffffffu;
  constexpr bool kIsHalf = std::is_same_v<T, Half>;
  // What T drops of the fraction. Below 2^-14 float16's numbers are evenly spaced, by 2^-24: as float32's are, times
  // 2^13, from 2^-14 on, whither such numbers are moved and back.
  constexpr uint32_t kDropped = kIsHalf ? (1u << 13) - 1 : (1u << 16) - 1;
  constexpr float kLeast = 0x1p-14f;
  const float lift = kIsHalf && size < float_bits(kLeast) ? kLeast : 0.0f;
  const uint32_t moved = float_bits(bits_float(size) + lift);
  const float kept = bits_float((moved + (random & kDropped)) & ~kDropped) - lift;
  return size >= 0x7f800000u ? x : bits_float(float_bits(kept) | sign);
}

}  // namespace tsr
