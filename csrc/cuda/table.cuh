// One key at a time in the index of a table, and the keys of each region by one thread.
#pragma once
#include "../table.h"
#include "atomics.cuh"
#include "primitives.cuh"

namespace tsr {

// ---- Keys -----------------------------------------------------------------------------------------------------------

// int32 or int64, told apart as kernels run: looking a key up costs far more.
struct Keys {
  const void* data;
  bool wide;

  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

inline Keys keys_of(DeviceCall& call, const Tensor& ids) {
  return {call.data(ids), ids.scalar_type() == ScalarType::Long};
}

// ---- The index ------------------------------------------------------------------------------------------------------

// Where a key is: its row, and the number of its slot in the region, counted through all buckets. -1: it is missing.
struct Found {
  int64_t row;
  int32_t slot;
};

// A bucket's first words: the tags, and the number of keys that passed by.
using BucketHead = Vector<int32_t, kRowsWord>;

// A bit for each slot with this tag: the exact form of the search for a byte that is 0, which finds no neighbour of
// one.
__device__ inline uint32_t slots_with(const BucketHead& tags, uint8_t tag) {
  constexpr uint32_t kLow = 0x7f7f7f7f;
  uint32_t found = 0;
#pragma unroll
  for (int w = 0; w < 3; ++w) {
    const uint32_t x = static_cast<uint32_t>(tags.at[w]) ^ tag * 0x01010101u;
    const uint32_t zeros = ~(((x & kLow) + kLow) | x | kLow);  // the highest bit of each byte that is 0,
    found |= (zeros >> 7) * 0x10204080u >> 28 << 4 * w;        // which the product moves side by side
  }
  return found;
}

struct TableView {
  int32_t* index;
  TableShape shape;
  int64_t* entries;
  int64_t rows;
  bool aligned;           // whether a bucket's head can be had by one load
  const int32_t* seeded;  // the line of the seed, or null

  __device__ uint64_t hash(int64_t key) const {
    if (seeded == nullptr) return hash_key(key);
    return hash_key(key, {seed_number(kFirstFactor), seed_number(kSecondFactor)});
  }
  __device__ KeyPlace place(int64_t key) const { return place_of(shape, hash(key)); }

  __device__ int32_t* bucket(int64_t number) const { return index + number * kBucketWords; }
  // Unsigned: in a damaged index it may be any number.
  __device__ uint32_t& passes(int64_t number) const { return reinterpret_cast<uint32_t*>(bucket(number))[kPassedWord]; }
  __device__ BucketHead head(int64_t number) const {
    if (aligned) return *reinterpret_cast<const BucketHead*>(bucket(number));
    BucketHead result;
#pragma unroll
    for (int w = 0; w < kRowsWord; ++w) result.at[w] = bucket(number)[w];
    return result;
  }
  // Whether a row of the index, which is the caller's word, has the key.
  __device__ bool has(int32_t row, int64_t key) const {
    return static_cast<uint32_t>(row) < static_cast<uint64_t>(rows) && entries[2 * static_cast<int64_t>(row)] == key;
  }

  __device__ Found find(int64_t key) const {
    const KeyPlace place = this->place(key);
    const int32_t size = region_size(place);
    int32_t at = place.home;
    for (int32_t visited = 0; visited < size; ++visited) {
      const BucketHead here = head(place.region + at);
      for (uint32_t slots = slots_with(here, place.tag); slots != 0; slots &= slots - 1) {
        const int slot = __ffs(static_cast<int>(slots)) - 1;
        const int32_t row = bucket(place.region + at)[kRowsWord + slot];
        if (has(row, key)) return {row, at * static_cast<int32_t>(kSlots) + slot};
      }
      if (here.at[kPassedWord] == 0) break;
      at = after(at, size);
    }
    return {-1, -1};
  }

  // The following are for one thread of a region, but for write_row and erase, which are for one thread of a key.

  // Takes a slot for a key that is not there, and returns it: -1, and nothing is written, where the region is full.
  __device__ int32_t insert(int64_t key, int32_t row) const {
    const KeyPlace place = this->place(key);
    const int32_t size = region_size(place);
    int32_t at = place.home, visited = 0;
    uint32_t free = 0;
    while ((free = slots_with(head(place.region + at), 0)) == 0) {
      if (++visited == size) return -1;
      at = after(at, size);
    }
    for (int32_t passed = place.home; passed != at; passed = after(passed, size)) {
      ++passes(place.region + passed);
    }
    const int slot = __ffs(static_cast<int>(free)) - 1;
    reinterpret_cast<uint8_t*>(bucket(place.region + at))[slot] = place.tag;
    bucket(place.region + at)[kRowsWord + slot] = row;
    return at * static_cast<int32_t>(kSlots) + slot;
  }

  __device__ void write_row(int64_t key, int32_t slot, int32_t row) const {
    bucket(region_of(shape, hash(key)) * kRegionBuckets + slot / kSlots)[kRowsWord + slot % kSlots] = row;
  }

  // Empties the slot of a key. Threads may do so for different keys of a region, while none looks for a key.
  __device__ void erase(int64_t key, int32_t slot) const {
    const KeyPlace place = this->place(key);
    const int32_t size = region_size(place), at = slot / static_cast<int32_t>(kSlots);
    for (int32_t passed = place.home; passed != at; passed = after(passed, size)) {
      atomicSub(&passes(place.region + passed), 1u);
    }
    reinterpret_cast<uint8_t*>(bucket(place.region + at))[slot % kSlots] = 0;
    bucket(place.region + at)[kRowsWord + slot % kSlots] = 0;
  }

 private:
  __device__ uint64_t seed_number(SeedNumber which) const {
    const uint64_t low = static_cast<uint32_t>(seeded[2 * which]), high = static_cast<uint32_t>(seeded[2 * which + 1]);
    return low | high << 32;
  }
  __device__ int32_t region_size(const KeyPlace& place) const {
    return shape.region_size(place.region / kRegionBuckets);
  }
  static __device__ int32_t after(int32_t bucket, int32_t size) { return bucket + 1 == size ? 0 : bucket + 1; }
};

// Operators that only look keys up write nothing through it.
inline TableView view_of(const Tensor& index, const Tensor& entries) {
  int32_t* const buckets = static_cast<int32_t*>(index.data_ptr());
  const int64_t count = buckets_of(index);
  return {buckets,
          TableShape(count),
          static_cast<int64_t*>(entries.data_ptr()),
          entries.size(0),
          reinterpret_cast<uintptr_t>(buckets) % sizeof(BucketHead) == 0,
          index.dim() == 2 ? nullptr : buckets + count * kBucketWords};
}

// ---- The items of each region ---------------------------------------------------------------------------------------

// Items (positions, or rows) whose keys are to be inserted, by region, in the order in which they are inserted.
struct RegionItems {
  Pairs<uint32_t> sorted;  // the region of each item, and the item
  int64_t count;
  int64_t regions;  // items of no region below it are left out
};

// pairs: the region of each item, and the item. There are fewer than 2^32 regions: their index would take 16 TB.
RegionItems sort_by_region(DeviceCall& call, Pairs<uint32_t> pairs, int64_t items, int64_t regions);

// One thread per item: that of a region's first one calls insert(item, key) for all of the region, in order.
// key_of(item) is asked for some ahead: what an insertion reads depends on it.
template <class KeyOf, class Insert>
__device__ void insert_regions(const RegionItems& items, const KeyOf& key_of, const Insert& insert) {
  constexpr int kAhead = 4;
  const uint32_t* const regions = items.sorted.keys;
  for (int64_t j = thread_index(); j < items.count; j += thread_count()) {
    const uint32_t region = regions[j];
    if (region >= items.regions || (j > 0 && regions[j - 1] == region)) continue;
    bool more = true;
    for (int64_t first = j; more; first += kAhead) {
      int64_t chosen[kAhead], keys[kAhead];
      bool here[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        here[k] = first + k < items.count && regions[first + k] == region;
        if (here[k]) chosen[k] = items.sorted.values[first + k];
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (here[k]) keys[k] = key_of(chosen[k]);
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (here[k]) insert(chosen[k], keys[k]);
      }
      more = here[kAhead - 1];
    }
  }
}

}  // namespace tsr
