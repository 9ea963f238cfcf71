// Which elements are the first of their value, by a hash table of positions.
//
// A slot of the table holds the earliest position known of one value; the values themselves are looked up in the input.
// A position that finds an earlier one of its value in the slot has that for a parent; one that puts a later one out of
// the slot becomes that one's parent. Which parents there are depends on the order of the threads, but a parent is
// always an earlier position of the same value, and the one position without a parent is the value's first.
//
// What a value is, the table's Keys say: an element of a vector, a row of a matrix, an id of one of many tables.
#pragma once
#include "../cuda.h"
#include "atomics.cuh"
#include "primitives.cuh"

namespace tsr {

// A bijection that spreads nearby values.
__device__ inline uint64_t scattered(uint64_t value) {
  uint64_t hash = value * 0x9e3779b97f4a7c15;
  hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93;
  return hash ^ hash >> 32;
}

// Keys have
//   Value                    what is held of a value while it is entered
//   capacity(n)              the slots of a table for n values
//   load(i)                  the value at position i
//   hash_of(value)           whose upper bits choose the slot
//   equals(position, value)  whether x holds the value there

// In an empty slot and as the parent of firsts. No entry is all ones: a position leaves one of its bits 0.
template <class P>
constexpr P kNone = static_cast<P>(~P{0});

// Open addressing. The low bits of a slot are a position; above them there is room for up to 8 bits of the value's
// hash, by which different values are told apart without a look at x.
template <class Keys, class P>
struct Positions {
  using Value = typename Keys::Value;

  Keys keys;
  P* slots;    // [capacity]
  P* parents;  // [n]
  uint64_t capacity;
  int position_bits;

  // Slots in a row that are tried before the hash is scattered anew: values made to collide part there.
  static constexpr int kRow = 32;

  Positions(const Keys& keys_, int64_t n)
      : keys(keys_), slots(nullptr), parents(nullptr), capacity(Keys::capacity(n)), position_bits(1) {
    while (n >> position_bits != 0) ++position_bits;
  }

  __device__ uint64_t slot_of(uint64_t hash) const { return __umul64hi(hash, capacity); }
  __device__ P entry_of(uint64_t hash, int64_t position) const {
    return static_cast<P>(hash & 0xff) << position_bits | static_cast<P>(position);
  }
  __device__ P position_of(P entry) const { return entry & ((P{1} << position_bits) - 1); }
  __device__ bool same_value(P entry, P mine, const Value& value) const {
    return (entry ^ mine) >> position_bits == 0 && keys.equals(static_cast<int64_t>(position_of(entry)), value);
  }

  // What the slot holds, which may be out of date: a later position of the same value. An empty slot takes the entry.
  __device__ P look(uint64_t slot, P entry) const {
    const P found = relaxed_load(&slots[slot]);
    return found == kNone<P> ? atomicCAS(&slots[slot], kNone<P>, entry) : found;
  }

  // Goes on where the hash's own slot is not empty but holds `found`.
  __device__ void settle(const Value& value, uint64_t hash, int64_t position, P found) const {
    const P entry = entry_of(hash, position);
    uint64_t slot = slot_of(hash);
    for (int step = 1; !same_value(found, entry, value); ++step) {
      if (step % kRow == 0) {
        hash = scattered(hash + static_cast<uint64_t>(step));  // the step: 0 would stay where it is
        slot = slot_of(hash);
      } else {
        slot = slot + 1 == capacity ? 0 : slot + 1;
      }
      found = look(slot, entry);
      if (found == kNone<P>) return;
    }
    if (found > entry) found = atomicMin(&slots[slot], entry);
    if (found > entry) {
      parents[position_of(found)] = static_cast<P>(position);
    } else {
      parents[position] = position_of(found);
    }
  }
};

// Elements that a thread has in flight: the slots lie anywhere in memory.
constexpr int kInFlight = 4;
constexpr int64_t kTile = kInFlight * kThreads;

inline LaunchShape one_block_each_tile(int64_t n) { return {std::min(n / kTile + (n % kTile != 0), kMaxBlocks)}; }

// Tiles of a block: for (int64_t i = tile_index(); ...; i += tile_stride()), whose elements are kThreads apart.
__device__ inline int64_t tile_index() { return static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x; }
__device__ inline int64_t tile_stride() { return static_cast<int64_t>(gridDim.x) * kTile; }

// Enters x[begin : n]. One thread enters kInFlight elements of a tile.
template <class Keys, class P>
__global__ void enter_kernel(Positions<Keys, P> table, int64_t begin, int64_t n) {
  for (int64_t start = begin + tile_index(); start < n; start += tile_stride()) {
    typename Keys::Value values[kInFlight];
    P found[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n) values[k] = table.keys.load(i);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n) found[k] = relaxed_load(&table.slots[table.slot_of(table.keys.hash_of(values[k]))]);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      const uint64_t hash = table.keys.hash_of(values[k]);
      if (i < n && found[k] == kNone<P>) {
        found[k] = atomicCAS(&table.slots[table.slot_of(hash)], kNone<P>, table.entry_of(hash, i));
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n && found[k] != kNone<P>) table.settle(values[k], table.keys.hash_of(values[k]), i, found[k]);
    }
  }
}

// The first tile goes ahead: it puts popular values in the table, so that the many threads that start together next
// find them by a load and do not all fight for one empty slot.
template <class Keys, class P>
void enter(DeviceCall& call, const Positions<Keys, P>& table, int64_t n) {
  const int64_t ahead = std::min(n, kTile);
  launch(call, one_block_each_tile(ahead), enter_kernel<Keys, P>, table, int64_t{0}, ahead);
  launch(call, one_block_each_tile(n - ahead), enter_kernel<Keys, P>, table, ahead, n);
}

// Each element's parent, of n: a chain that ends at the first of its value, whose parent is kNone.
template <class P, class Keys>
const P* find_parents(DeviceCall& call, const Keys& keys, int64_t n) {
  Positions<Keys, P> table(keys, n);
  const int64_t capacity = static_cast<int64_t>(table.capacity);
  table.slots = call.workspace<P>(capacity + n);
  table.parents = table.slots + capacity;
  fill_bytes(call.stream(), table.slots, 0xff, static_cast<size_t>(capacity + n) * sizeof(P));
  enter(call, table, n);
  return table.parents;
}

}  // namespace tsr
