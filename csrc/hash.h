// hash: FarmHash Fingerprint64 of integers' decimal text and of byte strings, reduced to buckets.
//
// to_hash_bucket_fast(x [...], num_buckets) -> int64 [...]: Fingerprint64(decimal text of x[i]) mod num_buckets, where the
//   text is what tf.strings.as_string gives ('-' for negatives, no padding); the dtype does not matter.
// string_to_hash_bucket_fast(bytes [M] uint8, offsets [N + 1] int64, num_buckets) -> int64 [N]: the same of
//   bytes[offsets[i] : offsets[i + 1]], raw (NUL and invalid UTF-8 count); this is Arrow's layout of strings.
// * x: every integer dtype, any shape. The hash is an unsigned 64-bit number and the remainder an unsigned one.
// * Errors: ValueError for num_buckets < 1, a wrong dtype or rank, offsets that decrease or leave [0, M].
// * Not differentiable. Deterministic; same on every machine (the text and the words are read as little-endian).
// Source: tf.strings.to_hash_bucket_fast (FarmHash, farmhashna::Hash64, whose constants are Google's, MIT licence).
#pragma once
#include "abi.h"
#include "dispatch.h"

namespace tsr {

inline void check_num_buckets(const char* op, int64_t num_buckets) {
  TSR_CHECK_VALUE(num_buckets >= 1, op, ": num_buckets must be >= 1, got ", num_buckets);
}

inline void check_to_hash_bucket_fast(const Tensor& x, int64_t num_buckets) {
  const char* op = "to_hash_bucket_fast";
  dispatch_integer(x.scalar_type(), op, "x", [](auto) {});
  check_num_buckets(op, num_buckets);
}

inline void check_string_to_hash_bucket_fast(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets) {
  const char* op = "string_to_hash_bucket_fast";
  TSR_CHECK_VALUE(bytes.dim() == 1 && bytes.scalar_type() == ScalarType::Byte, op,
                  ": bytes must be a uint8 vector, got ", dtype_name(bytes.scalar_type()), " of shape ",
                  shape_text(bytes));
  TSR_CHECK_VALUE(offsets.dim() == 1 && offsets.scalar_type() == ScalarType::Long && offsets.size(0) >= 1, op,
                  ": offsets must be an int64 vector with one element more than there are strings, got ",
                  dtype_name(offsets.scalar_type()), " of shape ", shape_text(offsets));
  check_num_buckets(op, num_buckets);
}

}  // namespace tsr
