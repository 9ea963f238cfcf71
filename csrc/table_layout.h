// Where a key belongs in a table's index, and what an entry holds: the layout that table.h describes.
#pragma once
#include "abi.h"
#include "hash_words.h"

namespace tsr {

// ---- Index ----------------------------------------------------------------------------------------------------------

constexpr int64_t kSlots = 12;          // of a bucket
constexpr int64_t kBucketWords = 16;    // int32
constexpr int64_t kPassedWord = 3;      // keys that passed by
constexpr int64_t kRowsWord = 4;        // where rows begin
constexpr int64_t kRegionBuckets = 64;  // at most, in a region
constexpr int64_t kFreeEntry = -1;      // in an entry's second number
constexpr int64_t kMostFrequency = INT32_MAX;
enum SeedNumber : int64_t { kSeed, kFirstFactor, kSecondFactor, kSeedNumbers };  // of an index with a seed, in its line

enum TableCounter : int64_t { kUsed, kReused, kFailed, kInserted, kTableCounters = 8 };

// Where a key belongs.
struct KeyPlace {
  int64_t region;  // its first bucket
  int32_t home;    // the bucket in the region
  uint8_t tag;     // never 0
};

// How the buckets of an index are cut into regions: all of one size, but the last, which takes the rest.
struct TableShape {
  int64_t buckets, regions;

  TSR_HOST_DEVICE explicit TableShape(int64_t buckets)
      : buckets(buckets), regions(buckets < 2 * kRegionBuckets ? 1 : buckets / kRegionBuckets) {}
  TSR_HOST_DEVICE int64_t region_begin(int64_t region) const { return region * kRegionBuckets; }
  TSR_HOST_DEVICE int32_t region_size(int64_t region) const {
    return static_cast<int32_t>(region + 1 == regions ? buckets - region_begin(region) : kRegionBuckets);
  }
};

inline int64_t buckets_of(const Tensor& index) {
  return index.dim() == 2 ? index.size(0) : index.size(0) / kBucketWords - 1;
}

inline KeyFactors factors_of_seed(int64_t seed) {
  const uint64_t first = hash_key(seed);
  return {first | 1, hash_key(static_cast<int64_t>(first ^ 0x9E3779B97F4A7C15ull)) | 1};
}

// The region by the upper bits, the bucket by the middle ones, the tag by the lowest.
TSR_HOST_DEVICE TSR_ALWAYS_INLINE int64_t region_of(const TableShape& shape, uint64_t hash) {
  return static_cast<int64_t>(multiply_high(hash, static_cast<uint64_t>(shape.regions)));
}

TSR_HOST_DEVICE TSR_ALWAYS_INLINE KeyPlace place_of(const TableShape& shape, uint64_t hash) {
  const int64_t region = region_of(shape, hash);
  const uint32_t size = static_cast<uint32_t>(shape.region_size(region));
  const uint32_t middle = static_cast<uint32_t>(hash >> 8) & 0xFFFFFFu;
  const uint8_t tag = static_cast<uint8_t>(hash);
  return {shape.region_begin(region), static_cast<int32_t>(static_cast<uint64_t>(middle) * size >> 24),
          static_cast<uint8_t>(tag == 0 ? 255 : tag)};
}

// ---- Entries --------------------------------------------------------------------------------------------------------

TSR_HOST_DEVICE inline int64_t pack_entry(int64_t version, int64_t frequency) {
  return static_cast<int64_t>(static_cast<uint64_t>(version) << 32 | static_cast<uint64_t>(frequency));
}
// Whether free_rows[k] can be given out, the first of them being free_rows[first].
TSR_HOST_DEVICE inline bool is_reusable(const int64_t* entries, const int32_t* free_rows, int64_t k, int64_t first,
                                        int64_t used) {
  const int64_t row = free_rows[k];
  return row >= 0 && row < used && entries[2 * row + 1] == kFreeEntry && (k == first || free_rows[k - 1] < row);
}

TSR_HOST_DEVICE inline int64_t entry_version(int64_t packed) { return packed >> 32; }
TSR_HOST_DEVICE inline int64_t entry_frequency(int64_t packed) {
  return static_cast<int64_t>(static_cast<uint32_t>(packed));
}

}  // namespace tsr
