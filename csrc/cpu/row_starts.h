// Where the rows of sorted row numbers begin.
#pragma once
#include "../sparse_tensor.h"
#include "bags.h"

namespace tsr {

// The starts [num_rows + 1] of the rows of ids [0, n), sorted; reports the first id that is outside [0, num_rows) or
// below the one before it. Every start is written by the item at which the row changes.
template <class I>
void start_rows(Column<I> ids, int64_t n, int64_t num_rows, int64_t* starts, FirstPosition& first_bad) {
  if (n == 0) return std::fill_n(starts, num_rows + 1, 0), void();
  parallel_for(0, n, kItemGrain, [=, &first_bad](int64_t begin, int64_t end) {
    int64_t previous = begin > 0 ? static_cast<int64_t>(ids[begin - 1]) : -1;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = ids[i];
      if (id == previous && i > 0) continue;
      if (id < 0 || id >= num_rows || id < previous) return first_bad.report(i);
      std::fill(starts + std::max<int64_t>(previous, -1) + 1, starts + id + 1, i);
      previous = id;
    }
    // Another part has reported a last id that is no row.
    if (end == n && previous >= 0 && previous < num_rows) std::fill(starts + previous + 1, starts + num_rows + 1, n);
  });
}

}  // namespace tsr
