// Bags and segments on the CPU: validation of offsets, ids and weights, and the denominators and coefficients of the
// reductions. Every check reports the first offender by position, whatever the number of threads.
#pragma once
#include <cmath>

#include "../checks.h"

namespace tsr {

// Items for one task of a parallel loop over ids: enough to hide the hand-out, few enough to balance.
constexpr int64_t kItemGrain = kWorkPerThread / 2;

// Offsets [num_segments + 1] of sorted segment ids. Throws for unsorted ids and ids outside [0, num_segments), where
// num_segments is the last id + 1 unless it was given.
Buffer<int64_t> offsets_of_sorted_ids(const char* op, const Tensor& segment_ids, int64_t num_segments, bool given);

// A copy of offsets as int64, checked: from 0 to items, never decreasing. items is appended unless it is the last.
Buffer<int64_t> checked_offsets(const char* op, const Tensor& offsets, int64_t items, bool include_last_offset = true);

// The boundaries [tasks + 1] of consecutive ranges of bags of about equal cost (a bag's items plus one).
std::vector<int64_t> balanced_ranges(const int64_t* offsets, int64_t bags, int64_t tasks);

// Throws IndexError for the index found at `position`.
[[noreturn]] void throw_bad_index(const char* op, const char* argument, const Tensor& indices, int64_t position,
                                  int64_t bound);

// Whether all of ids[0, n) are in [0, bound).
template <class I>
bool all_below(const I* ids, int64_t n, int64_t bound) {
  // The sign of id or of bound - 1 - id tells; signs add up without branches or comparisons.
  const uint64_t last = static_cast<uint64_t>(bound) - 1;
  uint64_t signs = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
    signs |= id | (last - id);
  }
  return signs >> 63 == 0;
}

// Reports the first of ids[begin, end) outside [0, bound), if any.
template <class I>
void report_bad_ids(const I* ids, int64_t begin, int64_t end, int64_t bound, FirstPosition& first_bad) {
  if (all_below(ids + begin, end - begin, bound)) return;
  int64_t i = begin;
  while (all_below(ids + i, 1, bound)) ++i;
  first_bad.report(i);
}

// What a bag's sum is divided by: n or the sum of weights (mean), sqrt(n) or the root of the sum of squares (sqrtn).
// `sum` and `squares` are over the bag's weights in order, n and n when there are none.
template <class A>
A denominator(Reduction reduction, A sum, A squares) {
  if (reduction == Reduction::kMean) return sum;
  if (reduction == Reduction::kSqrtN) return std::sqrt(squares);
  return A(1);
}

// The gradient of an entry's weight, from <grad, row> and <grad, output> of its bag, whose divisor is not zero.
template <class A>
A weight_gradient(Reduction reduction, A with_row, A with_output, A weight, A divisor) {
  if (reduction == Reduction::kMean) return (with_row - with_output) / divisor;
  if (reduction == Reduction::kSqrtN) return (with_row - with_output * weight / divisor) / divisor;
  return with_row;
}

}  // namespace tsr
