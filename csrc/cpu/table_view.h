// One key at a time in the index of a table: find, insert, erase. A region belongs to one thread while it is written.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstring>

#include "../table.h"

namespace tsr {

// A table's tensors. In loops that insert, rows below 0 are the complements of positions in `ids` whose keys have no
// row yet.
struct TableView {
  int32_t* index;
  TableShape shape;
  int64_t* entries;
  int64_t rows;
  KeyFactors factors{};

  uint64_t hash(int64_t key) const { return hash_key(key, factors); }
  KeyPlace place(int64_t key) const { return place_of(shape, hash(key)); }
  int32_t* bucket(int64_t number) const { return index + number * kBucketWords; }
  // Whether a row of the index, which is the caller's word, has the key.
  bool has(int32_t row, int64_t key) const {
    return static_cast<uint32_t>(row) < static_cast<uint64_t>(rows) && entries[2 * static_cast<int64_t>(row)] == key;
  }
};

// The words of an index, in which a seed's line follows the buckets.
inline TableView view_of(int32_t* words, const Tensor& index, int64_t* entries, int64_t rows) {
  if (index.dim() == 2) return {words, TableShape(index.size(0)), entries, rows};
  const int64_t buckets = index.size(0) / kBucketWords - 1;
  uint64_t numbers[kSeedNumbers];
  std::memcpy(numbers, words + buckets * kBucketWords, sizeof(numbers));
  return {words, TableShape(buckets), entries, rows, {numbers[kFirstFactor], numbers[kSecondFactor]}};
}

// For operators that only read: nothing is written through it.
inline TableView read_view(const Tensor& index, const Tensor& entries) {
  return view_of(const_cast<int32_t*>(index.const_data_ptr<int32_t>()), index,
                 const_cast<int64_t*>(entries.const_data_ptr<int64_t>()), entries.size(0));
}

inline TableView write_view(const Tensor& index, const Tensor& entries) {
  return view_of(index.mutable_data_ptr<int32_t>(), index, entries.mutable_data_ptr<int64_t>(), entries.size(0));
}

// A bit for each slot of the bucket with this tag.
TSR_ALWAYS_INLINE uint32_t slots_with(const int32_t* bucket, uint8_t tag) {
#if defined(__SSE2__)
  const __m128i tags = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bucket));
  const __m128i same = _mm_cmpeq_epi8(tags, _mm_set1_epi8(static_cast<char>(tag)));
  return static_cast<uint32_t>(_mm_movemask_epi8(same)) & ((1u << kSlots) - 1);
#else
  const uint8_t* tags = reinterpret_cast<const uint8_t*>(bucket);
  uint32_t found = 0;
  for (int slot = 0; slot < kSlots; ++slot) found |= static_cast<uint32_t>(tags[slot] == tag) << slot;
  return found;
#endif
}

// The buckets on a key's way, from its home on.
class Way {
 public:
  Way(const TableView& table, const KeyPlace& place)
      : first_(table.bucket(place.region)),
        size_(table.shape.region_size(place.region / kRegionBuckets)),
        at_(place.home) {}

  int32_t* bucket() const { return first_ + static_cast<int64_t>(at_) * kBucketWords; }
  // Goes on to the next bucket; false where all have been visited.
  bool next() {
    at_ = at_ + 1 == size_ ? 0 : at_ + 1;
    return ++visited_ < size_;
  }

 private:
  int32_t* first_;
  int32_t size_, at_, visited_ = 0;
};

// The slot that has the key, among the words of the index, or null. is_key(row) says whether a row is the key's.
template <class IsKey>
int32_t* find_slot(const TableView& table, const KeyPlace& place, const IsKey& is_key) {
  Way way(table, place);
  do {
    int32_t* bucket = way.bucket();
    for (uint32_t found = slots_with(bucket, place.tag); found != 0; found &= found - 1) {
      int32_t* row = bucket + kRowsWord + lowest_bit(found);
      if (is_key(*row)) return row;
    }
    if (bucket[kPassedWord] == 0) return nullptr;
  } while (way.next());
  return nullptr;
}

inline int64_t find_row(const TableView& table, const KeyPlace& place, int64_t key) {
  const int32_t* slot = find_slot(table, place, [&](int32_t row) { return table.has(row, key); });
  return slot == nullptr ? -1 : *slot;
}

// Keys that passed a bucket by. Unsigned: in a damaged index it may be any number.
inline uint32_t& passes(int32_t* bucket) { return reinterpret_cast<uint32_t*>(bucket)[kPassedWord]; }

// Takes a slot for a key that is not there; null, and nothing written, where its region is full.
inline int32_t* insert_slot(const TableView& table, const KeyPlace& place, int32_t row) {
  Way way(table, place);
  uint32_t free = 0;
  while ((free = slots_with(way.bucket(), 0)) == 0) {
    if (!way.next()) return nullptr;
  }
  int32_t* const bucket = way.bucket();
  for (Way passed(table, place); passed.bucket() != bucket; passed.next()) ++passes(passed.bucket());
  const int slot = lowest_bit(free);
  reinterpret_cast<uint8_t*>(bucket)[slot] = place.tag;
  bucket[kRowsWord + slot] = row;
  return bucket + kRowsWord + slot;
}

// Empties the slot of a key.
inline void erase_slot(const TableView& table, const KeyPlace& place, int32_t* slot) {
  const int64_t word = (slot - table.index) % kBucketWords;
  int32_t* const bucket = slot - word;
  for (Way passed(table, place); passed.bucket() != bucket; passed.next()) --passes(passed.bucket());
  reinterpret_cast<uint8_t*>(bucket)[word - kRowsWord] = 0;
  *slot = 0;
}

}  // namespace tsr
