// Device-wide sorting, scanning and selecting, on a call's stream and with its scratch memory.
//
// Compiled once, in primitives.cu, over CUB. Inputs and outputs must not overlap unless a function says that it works
// in place. No function waits for the device.
#pragma once
#include <cstdint>

#include "../cuda.h"

namespace tsr {

// Keys, each with a value that goes where it goes. Where both fit in 32 bits, sorting moves half the bytes.
template <class K>
struct Pairs {
  K* keys;
  K* values;
};

// Sorts stably by the low `bits` bits of keys. Uses both buffers; returns the one that holds the result.
Pairs<uint32_t> sort_pairs(DeviceCall& call, Pairs<uint32_t> from, Pairs<uint32_t> spare, int64_t n, int bits);
Pairs<uint64_t> sort_pairs(DeviceCall& call, Pairs<uint64_t> from, Pairs<uint64_t> spare, int64_t n, int bits);

// before[w] = number of set bits in words[0 : w], for w in [0, n]. words has n + 1 elements, of which the last is not
// counted.
void count_bits_before(DeviceCall& call, const uint32_t* words, int64_t n, int64_t* before);

// before[i] = counts[0] + ... + counts[i - 1], for i in [0, n]. counts has n + 1 elements, of which the last is not
// counted.
void sums_before(DeviceCall& call, const int64_t* counts, int64_t n, int64_t* before);

// The positions j in [0, n], ascending, at which keys[j] differs from keys[j - 1], with keys[n] taken to be `end`;
// position 0 is always one. starts has room for n + 1; count is their number.
void select_run_starts(DeviceCall& call, const uint32_t* keys, int64_t n, uint32_t end, int64_t* starts,
                       int64_t* count);
void select_run_starts(DeviceCall& call, const uint64_t* keys, int64_t n, uint64_t end, int64_t* starts,
                       int64_t* count);

}  // namespace tsr
