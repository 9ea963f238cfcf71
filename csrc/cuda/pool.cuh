// Rows of a table pooled bag by bag: the kernels behind the pooled lookups, the segment reductions and all gradients
// with respect to a table.
#pragma once
#include "../checks.h"
#include "../cuda.h"

namespace tsr {

// What a bag's sum is divided by; the quotient is zero where the divisor is zero. Entries without weights weigh 1.
enum class Divisor : int32_t { kOne, kCount, kWeights, kRootSquares };

inline Divisor divisor_of(Reduction reduction) {
  return reduction == Reduction::kMean    ? Divisor::kWeights
         : reduction == Reduction::kSqrtN ? Divisor::kRootSquares
                                          : Divisor::kOne;
}

// It, of `count` entries whose weights, and whose squares of weights, have these sums.
template <class A>
__device__ A divisor_of(Divisor divisor, A count, A sum, A squares) {
  return divisor == Divisor::kOne       ? A(1)
         : divisor == Divisor::kCount   ? count
         : divisor == Divisor::kWeights ? sum
                                        : sqrt(squares);
}

// The gradient of an entry's weight, from <grad, row> and <grad, output> of its bag, which is divided.
template <class A>
__device__ A divided_weight_gradient(Reduction reduction, A with_row, A with_output, A weight, A divisor) {
  const A share = reduction == Reduction::kMean ? A(1) : weight / divisor;
  return divisor == A(0) ? A(0) : (with_row - with_output * share) / divisor;
}

// out[b, :] = sum over j in [offsets[b], offsets[b + 1]), in this order, of c_j * table[indices[j], :] / divisor, where
// c_j is weights[j], coefficients[j], scales[indices[j]] or 1. Entries whose index is padding_idx or outside [0, rows)
// do not count.
struct Pooling {
  ScalarType dtype{};           // of table, weights and out
  const void* table = nullptr;  // [rows, columns]
  int64_t rows = 0;
  int64_t columns = 0;
  ScalarType index_dtype = ScalarType::Long;
  const void* indices = nullptr;  // [entries]
  int64_t entries = 0;
  const int64_t* offsets = nullptr;  // [bags + 1], within the entries
  int64_t bags = 0;
  void* out = nullptr;  // [bags, columns]
  // At most one of them; the last two in the accumulator's type. A NaN weight is reported and counts as zero.
  const void* weights = nullptr;       // [entries]
  const void* coefficients = nullptr;  // [entries]
  const void* scales = nullptr;        // [rows]
  int64_t padding_idx = -1;
  Divisor divisor = Divisor::kOne;
  bool report = true;  // whether bad indices and weights are reported, as `indices` and `per_sample_weights`
};

void pool_rows(DeviceCall& call, const Pooling& pooling);
// pool_rows where there are weights, and where there are coefficients or scales: it calls them.
void pool_weighted_rows(DeviceCall& call, const Pooling& pooling);
void pool_scaled_rows(DeviceCall& call, const Pooling& pooling);

// pool_rows in a table that is split: out = sum of weights[j] * coefficients[j] * row indices[j] of the shards. Both
// may be null, and coefficients do not count for the divisor; there are no scales. pooling.table is not read.
struct ShardedTable;
void pool_sharded_rows(DeviceCall& call, const Pooling& pooling, const ShardedTable& shards);

// The divisor of each bag in the accumulator's type: [bags]. Reads no table.
const void* pool_divisors(DeviceCall& call, const Pooling& pooling);

// out[b, :] = the maximum or minimum of the bag's rows, argmax[b, :] the position j that it comes from: the first of
// equals, and a NaN before all else. A bag without entries has zero and -1. No weights, no divisor.
void pool_extremes(DeviceCall& call, const Pooling& pooling, Reduction reduction, int64_t* argmax);

// pool_rows, where of row indices[j] only the columns count whose winner, [rows, columns], is positions[j], [entries].
// No weights, no scales.
void pool_won_rows(DeviceCall& call, const Pooling& pooling, const int64_t* winners, const int64_t* positions);

}  // namespace tsr
