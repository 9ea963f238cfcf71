// hash: hashes of integers' decimal text and of byte strings, as they are or reduced to buckets.
//
// fingerprint64(x [...]) -> int64 [...]: the 64 bits of FarmHash Fingerprint64, as int64 (so half of them are
//   negative), of the decimal text of x[i], as tf.strings.as_string writes it ('-' for negatives, no padding); the
//   dtype does not matter.
// to_hash_bucket_fast(x, num_buckets) -> int64 [...]: fingerprint64 modulo num_buckets.
// to_hash_bucket_strong(x, num_buckets, key0, key1): SipHash-2-4 modulo num_buckets; its key is the two 64-bit words.
// to_hash_bucket(x, num_buckets): MurmurHash64A with the seed 0xDECAFCAFFE, modulo num_buckets.
// string_<name>(bytes [M] uint8, offsets [N + 1] int64, ...) -> int64 [N]: operator <name> of the byte strings
//   bytes[offsets[i] : offsets[i + 1]], raw (NUL and invalid UTF-8 count); this is Arrow's layout of strings.
// column_ids(columns [C], num_buckets [C], missing [C]) -> (ids int64 [N], keep bool [N], num_missing int64 []): the
//   integers of all columns, one after the other, as ids. num_buckets[c] 0: as they are (uint64 beyond int64: 2^63 - 1),
//   else to_hash_bucket_fast of them. keep[i] is false where a value is missing: with missing[c] 1 where it is -1, with
//   2 where it is negative, with 0 nowhere; num_missing is how many these are. Without a column whose values can be
//   missing, keep is [0].
// * x, columns[c]: every integer dtype, any shape. A hash is an unsigned 64-bit number and its remainder an unsigned one.
// * Errors: ValueError for num_buckets < 1 (column_ids: < 0), a wrong dtype or rank, offsets that decrease or leave
//   [0, M]; lists of other lengths, missing outside [0, 2].
// * Not differentiable. Deterministic; same on every machine (the text and the words are read as little-endian).
// Source: tf.strings.to_hash_bucket_fast, to_hash_bucket_strong, to_hash_bucket; tf.fingerprint.
//
// A hash is a policy: of_bytes(text, n) hashes a byte string, of_text(decimal) an integer. A second policy turns the
// hash into the result.
#pragma once
#include "abi.h"
#include "hash_farm.h"
#include "hash_murmur.h"
#include "hash_siphash.h"
#include "shared_memory.h"

namespace tsr {

// ---- Results --------------------------------------------------------------------------------------------------------

// The hash itself.
struct HashBits {
  TSR_HOST_DEVICE int64_t operator()(uint64_t hash) const { return static_cast<int64_t>(hash); }
};

// hash mod num_buckets by a multiplication. The estimated quotient is the true one or 1 less, since
// hash * floor((2^64 - 1) / d) / 2^64 > hash / d - 1: one correction is enough.
struct BucketRemainder {
  uint64_t divisor;
  uint64_t reciprocal;

  explicit BucketRemainder(int64_t num_buckets)
      : divisor(static_cast<uint64_t>(num_buckets)), reciprocal(~uint64_t{0} / divisor) {}

  TSR_HOST_DEVICE int64_t operator()(uint64_t hash) const {
    const uint64_t remainder = hash - multiply_high(hash, reciprocal) * divisor;
    return static_cast<int64_t>(remainder >= divisor ? remainder - divisor : remainder);
  }
};

// ---- Checks ---------------------------------------------------------------------------------------------------------

inline void check_num_buckets(const char* op, int64_t num_buckets) {
  TSR_CHECK_VALUE(num_buckets >= 1, op, ": num_buckets must be >= 1, got ", num_buckets);
}

// The remainder of a valid number of buckets.
inline BucketRemainder checked_buckets(const char* op, int64_t num_buckets) {
  check_num_buckets(op, num_buckets);
  return BucketRemainder(num_buckets);
}

inline void check_hash_integers(const char* op, const Tensor& x, const char* argument = "x") {
  dispatch_integer(x.scalar_type(), op, argument, [](auto) {});
}

inline void check_hash_strings(const char* op, const Tensor& bytes, const Tensor& offsets) {
  TSR_CHECK_VALUE(bytes.dim() == 1 && bytes.scalar_type() == ScalarType::Byte, op,
                  ": bytes must be a uint8 vector, got ", dtype_name(bytes.scalar_type()), " of shape ",
                  shape_text(bytes));
  TSR_CHECK_VALUE(offsets.dim() == 1 && offsets.scalar_type() == ScalarType::Long && offsets.size(0) >= 1, op,
                  ": offsets must be an int64 vector with one element more than there are strings, got ",
                  dtype_name(offsets.scalar_type()), " of shape ", shape_text(offsets));
  check_same_device(op, "offsets", offsets, "bytes", bytes);
}

// ---- Columns --------------------------------------------------------------------------------------------------------

// Which values of a column are missing.
enum class Missing : int64_t { kNone = 0, kMinusOne = 1, kNegative = 2 };

// Whether a negative value is missing; others never are.
TSR_HOST_DEVICE inline bool is_missing(Missing missing, int64_t negative) {
  return missing == Missing::kNegative || (missing == Missing::kMinusOne && negative == -1);
}

// An integer of 64 bits as an id. Beyond int64 it is too large for every table; wrapped, it would count as negative.
TSR_HOST_DEVICE inline int64_t id_of(uint64_t bits, bool is_signed) {
  const int64_t id = static_cast<int64_t>(bits);
  return is_signed || id >= 0 ? id : INT64_MAX;
}

// The number of values of all columns.
inline int64_t check_column_ids(const std::vector<Tensor>& columns, const std::vector<int64_t>& num_buckets,
                                const std::vector<int64_t>& missing) {
  const char* op = "column_ids";
  TSR_CHECK_VALUE(num_buckets.size() == columns.size() && missing.size() == columns.size(), op,
                  ": num_buckets and missing must hold one number for each of the ", columns.size(), " columns, got ",
                  num_buckets.size(), " and ", missing.size());
  int64_t count = 0;
  for (size_t c = 0; c < columns.size(); ++c) {
    check_hash_integers(op, columns[c], "columns");
    check_same_device(op, Place{"columns", c}, columns[c], "columns[0]", columns[0]);
    TSR_CHECK_VALUE(num_buckets[c] >= 0, op, ": num_buckets must be >= 0, got ", num_buckets[c], " at position ", c);
    TSR_CHECK_VALUE(missing[c] >= 0 && missing[c] <= 2, op, ": missing must be 0, 1 or 2, got ", missing[c],
                    " at position ", c);
    count += columns[c].numel();
  }
  return count;
}

inline bool can_be_missing(const std::vector<int64_t>& missing) {
  return std::any_of(missing.begin(), missing.end(), [](int64_t each) { return each != 0; });
}

}  // namespace tsr
