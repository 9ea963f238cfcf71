// The loop over rows with one cross each, a body of isa_foreach.h: cross_rows(columns, start, bucket, row, n, out)
// writes the crosses of the n rows from `row` on, in each of which every column has one value: they lie one after the
// other.

static inline void cross_rows_one_by_one(const std::vector<CrossColumn>& columns, const CrossHash& start,
                                         const BucketRemainder& bucket, int64_t row, int64_t n, int64_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    CrossHash hash = start;
    for (const CrossColumn& column : columns) hash = hash.with(column.values[column.begin(row) + i]);
    out[i] = bucket(hash.value);
  }
}

#if TSR_ISA_LEVEL == 0

static void cross_rows(const std::vector<CrossColumn>& columns, const CrossHash& start, const BucketRemainder& bucket,
                       int64_t row, int64_t n, int64_t* out) {
  cross_rows_one_by_one(columns, start, bucket, row, n, out);
}

#else

#include "hash_lanes.h"

static inline Lanes shift_mix(Lanes v) { return v ^ v >> 47; }

// fingerprint_cat64() of csrc/hash_cross.h on lanes.
static inline Lanes fingerprint_cat64(Lanes a, Lanes b) {
  const Lanes k = splat(kMurmur);
  return shift_mix(shift_mix((a ^ k ^ shift_mix(b * k) * k) * k) * k);
}

static void cross_rows(const std::vector<CrossColumn>& columns, const CrossHash& start, const BucketRemainder& bucket,
                       int64_t row, int64_t n, int64_t* out) {
  const auto result_of = lanes_of(bucket);
  const int64_t whole = n - n % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes hash = splat(start.value);
    bool exists = start.exists;
    for (const CrossColumn& column : columns) {
      const Lanes word = load(reinterpret_cast<const uint64_t*>(column.values + column.begin(row) + i));
      hash = exists ? fingerprint_cat64(hash, word) : word;
      exists = true;
    }
    store(reinterpret_cast<uint64_t*>(out + i), result_of(hash));
  }
  if (whole < n) {
    const int64_t rest = row + whole;  // its values begin `whole` places on, since all rows have one
    cross_rows_one_by_one(columns, start, bucket, rest, n - whole, out + whole);
  }
}

#endif
