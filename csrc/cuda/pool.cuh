// Rows of a table summed bag by bag: the one kernel behind the pooled lookups, the segment reductions and all their
// gradients.
#pragma once
#include "../cuda.h"
#include "../segment.h"

namespace tsr {

// What a bag's sum is divided by; zero where the divisor is zero. Entries without weights weigh 1.
enum class Divisor : int32_t { kOne, kCount, kWeights, kRootSquares };

inline Divisor divisor_of(Reduction reduction) {
  return reduction == Reduction::kMean    ? Divisor::kWeights
         : reduction == Reduction::kSqrtN ? Divisor::kRootSquares
                                          : Divisor::kOne;
}

// out[b, :] = sum over j in [offsets[b], offsets[b + 1]), in this order, of weights[j] * table[indices[j], :] /
// divisor. Entries whose index is padding_idx or outside [0, rows) do not count.
struct Pooling {
  ScalarType dtype{};           // of table and out
  const void* table = nullptr;  // [rows, columns]
  int64_t rows = 0;
  int64_t columns = 0;
  ScalarType index_dtype = ScalarType::Long;
  const void* indices = nullptr;  // [entries]
  int64_t entries = 0;
  const int64_t* offsets = nullptr;  // [bags + 1], within the entries
  int64_t bags = 0;
  void* out = nullptr;            // [bags, columns]
  const void* weights = nullptr;  // [entries] in the accumulator's type, or none
  int64_t padding_idx = -1;
  Divisor divisor = Divisor::kOne;
  bool report = true;  // whether an index outside [0, rows) is reported, as one of `indices`
};

void pool_rows(DeviceCall& call, const Pooling& pooling);

}  // namespace tsr
