// hash: crosses of columns, every combination of one value of each column, as one number.
//
// cross_hashed(values [C], offsets [C], num_buckets, hash_key) -> (values int64 [N], offsets int64 [B + 1]): row b
//   holds the crosses of the rows b of all columns: every combination of one value of each, the last column's changing
//   fastest; a row is empty if any column's is. Column c is either jagged, with values[c] int64 [M_c] and offsets[c]
//   int64 [B + 1], or a matrix values[c] int64 [B, k_c] whose rows have k_c values, with an empty offsets[c].
// * A cross of the values v_1 ... v_C is h_C mod num_buckets, with h_0 = hash_key, h_c = cat(h_(c-1), v_c), all as
//   unsigned numbers; without a hash_key, h_1 = v_1; num_buckets 0 stands for 2^63 - 1. Strings are crossed as their
//   fingerprint64. cat(a, b) = mix(mix((a ^ K ^ mix(b K) K) K) K), with mix(v) = v ^ v >> 47 and
//   K = 0xc6a4a7935bd1e995.
// * Duplicates count, each in its place.
// * Errors: ValueError for no or more than 120 columns, wrong dtypes or ranks, different numbers of rows,
//   num_buckets < 0, offsets that decrease or leave [0, M_c], and a row of more than 2^62 / B crosses. On CUDA kernels
//   find the last two, and leave the row empty.
// * Not differentiable. Deterministic.
// Source: tf.sparse.cross_hashed (SparseCross); without a hash_key SparseCrossHashed.
#pragma once
#include "abi.h"
#include "hash.h"
#include "shared_memory.h"

namespace tsr {

TSR_HOST_DEVICE inline uint64_t fingerprint_cat64(uint64_t a, uint64_t b) {
  const uint64_t mixed = murmur_shift_mix(b * kMurmur) * kMurmur;
  const uint64_t product = (a ^ kMurmur ^ mixed) * kMurmur;
  return murmur_shift_mix(murmur_shift_mix(product) * kMurmur);
}

// The hash of the columns so far: at first the key, or nothing.
struct CrossHash {
  uint64_t value;
  bool exists = true;

  explicit CrossHash(std::optional<int64_t> key) : value(static_cast<uint64_t>(key.value_or(0))), exists(key) {}
  TSR_HOST_DEVICE explicit CrossHash(uint64_t hash) : value(hash) {}

  // The hash of the columns so far and of one value more.
  TSR_HOST_DEVICE CrossHash with(int64_t next) const {
    const uint64_t word = static_cast<uint64_t>(next);
    return CrossHash(exists ? fingerprint_cat64(value, word) : word);
  }
};

// One column, jagged or a matrix.
struct CrossColumn {
  const int64_t* values;
  const int64_t* offsets;  // null for a matrix
  int64_t size;            // of values
  int64_t width;           // of a matrix

  TSR_HOST_DEVICE int64_t begin(int64_t row) const { return offsets != nullptr ? offsets[row] : row * width; }
  TSR_HOST_DEVICE int64_t end(int64_t row) const { return begin(row + 1); }
  // Each such look is enough for its own row, whatever the other offsets are.
  TSR_HOST_DEVICE bool is_valid(int64_t row) const {
    const int64_t first = begin(row), last = end(row);
    return first >= 0 && first <= last && last <= size;
  }
};

// a * b for numbers >= 0, or `most` where it is more than that.
TSR_HOST_DEVICE inline int64_t product_up_to(int64_t a, int64_t b, int64_t most) {
  constexpr int64_t half = int64_t{1} << 31;
  if (a < half && b < half) return a * b < most ? a * b : most;
  return a != 0 && b > most / a ? most : a * b;  // rare: a division is slow
}

// The most crosses that a row may have: the sum over all rows then fits an int64.
inline int64_t most_crosses(int64_t rows) { return (int64_t{1} << 62) / std::max<int64_t>(rows, 1); }

// What offsets[c] must do, in errors.
constexpr const char* kColumnOffsetsRule = " must not decrease or leave [0, the number of values]";

inline std::string too_many_crosses(int64_t most, int64_t row) {
  return message("cross_hashed: values must have at most ", most, " crosses in a row, got more in row ", row);
}

// A kernel takes all columns as one argument, of which it can have 4 kB.
constexpr size_t kMostColumns = 120;

// The number of rows.
inline int64_t check_cross_hashed(const std::vector<Tensor>& values, const std::vector<Tensor>& offsets,
                                  int64_t num_buckets) {
  const char* op = "cross_hashed";
  TSR_CHECK_VALUE(!values.empty() && values.size() <= kMostColumns, op, ": values must hold 1 to ", kMostColumns,
                  " columns, got ", values.size());
  TSR_CHECK_VALUE(values.size() == offsets.size(), op, ": offsets must hold one tensor for each of the ", values.size(),
                  " columns, got ", offsets.size());
  TSR_CHECK_VALUE(num_buckets >= 0, op, ": num_buckets must be >= 0, got ", num_buckets);
  int64_t rows = 0;
  for (size_t c = 0; c < values.size(); ++c) {
    const Tensor &value = values[c], &bounds = offsets[c];
    TSR_CHECK_VALUE((value.dim() == 1 || value.dim() == 2) && value.scalar_type() == ScalarType::Long, op, ": values[",
                    c, "] must be an int64 vector or matrix, got ", dtype_name(value.scalar_type()), " of shape ",
                    shape_text(value));
    TSR_CHECK_VALUE(bounds.dim() == 1 && bounds.scalar_type() == ScalarType::Long, op, ": offsets[", c,
                    "] must be an int64 vector, got ", dtype_name(bounds.scalar_type()), " of shape ",
                    shape_text(bounds));
    TSR_CHECK_VALUE((value.dim() == 2) == (bounds.size(0) == 0), op, ": offsets[", c, "] must ",
                    value.dim() == 2 ? "be empty, since values are a matrix" : "have one element more than rows",
                    ", got shape ", shape_text(bounds));
    check_same_device(op, Place{"values", c}, value, "values[0]", values[0]);
    check_same_device(op, Place{"offsets", c}, bounds, "values[0]", values[0]);
    const int64_t own = value.dim() == 2 ? value.size(0) : bounds.size(0) - 1;
    if (c == 0) rows = own;
    TSR_CHECK_VALUE(own == rows, op, ": all columns must have the ", rows, " rows of the first, got ", own,
                    " in column ", c);
  }
  return rows;
}

// contiguous: a tensor to the address of its elements in order.
template <class F>
CrossColumn cross_column(const Tensor& values, const Tensor& offsets, const F& contiguous) {
  const bool matrix = values.dim() == 2;
  return {contiguous(values), matrix ? nullptr : contiguous(offsets), values.numel(), matrix ? values.size(1) : 0};
}

inline BucketRemainder cross_buckets(int64_t num_buckets) {
  return BucketRemainder(num_buckets == 0 ? INT64_MAX : num_buckets);
}

}  // namespace tsr
