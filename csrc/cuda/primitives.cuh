// Device-wide sorting, scanning and selecting, on a call's stream and with its scratch memory.
//
// Compiled once, in primitives.cu, over CUB. Inputs and outputs must not overlap unless a function says that it works
// in place. No function waits for the device.
#pragma once
#include <cstdint>

#include "../cuda.h"

namespace tsr {

// Keys with the positions they came from. Where both fit in 32 bits, sorting moves half the bytes.
template <class K>
struct KeyedPositions {
  K* keys;
  K* positions;
};

// Sorts stably by the low `bits` bits of keys. Uses both buffers; returns the one that holds the result.
KeyedPositions<uint32_t> sort_pairs(DeviceCall& call, KeyedPositions<uint32_t> from, KeyedPositions<uint32_t> spare,
                                    int64_t n, int bits);
KeyedPositions<uint64_t> sort_pairs(DeviceCall& call, KeyedPositions<uint64_t> from, KeyedPositions<uint64_t> spare,
                                    int64_t n, int bits);

// before[i] = number of set flags (1, the others 0) in [0, i), for i in [0, n]. flags has n + 1 elements, of which the
// last is not counted.
void count_before(DeviceCall& call, const uint8_t* flags, int64_t n, int64_t* before);

// The same of bits: before[w] = number of set bits in words[0 : w], for w in [0, n]. words has n + 1 elements, of which
// the last is not counted.
void count_bits_before(DeviceCall& call, const uint32_t* words, int64_t n, int64_t* before);

// The positions of set flags, ascending, and their number.
void select_positions(DeviceCall& call, const uint8_t* flags, int64_t n, int64_t* positions, int64_t* count);

}  // namespace tsr
