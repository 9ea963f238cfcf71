// Where the rows of sorted row numbers begin.
#pragma once
#include "../sparse_tensor.h"
#include "bags.h"

namespace tsr {

// The starts [num_rows + 1] of the rows of ids [0, n), sorted; reports the first id that is outside [0, num_rows) or
// below the one before it.
template <class I>
void start_rows(Column<I> ids, int64_t n, int64_t num_rows, int64_t* starts, FirstPosition& first_bad) {
  if (n == 0) return std::fill_n(starts, num_rows + 1, 0), void();
  constexpr int64_t kBlock = 4096;  // looked at twice while it is in the first-level cache
  const auto id_at = [=](int64_t i) { return i < 0 ? int64_t{-1} : static_cast<int64_t>(ids[i]); };
  const auto is_bad = [=](int64_t i) {
    // The sign of one of these tells; as in all_below, without branches.
    const uint64_t id = static_cast<uint64_t>(id_at(i)), previous = static_cast<uint64_t>(id_at(i - 1));
    return (id | (static_cast<uint64_t>(num_rows) - 1 - id) | (id - previous)) >> 63;
  };
  parallel_for(0, n, kItemGrain, [=, &first_bad](int64_t begin, int64_t end) {
    for (int64_t block = begin, block_end; block < end; block = block_end) {
      block_end = std::min(block + kBlock, end);
      uint64_t bad = is_bad(block);
      for (int64_t i = block + 1; i < block_end; ++i) bad |= is_bad(i);
      if (bad != 0) {
        while (is_bad(block) == 0) ++block;
        return first_bad.report(block);
      }
      // From the last item on, so that a row's first item writes last: no branch on whether an id repeats, which
      // mispredicts. A row that began in an earlier block has its start from there.
      const int64_t before = id_at(block - 1);
      for (int64_t i = block_end - 1, id = id_at(i), previous; i >= block && id != before; --i, id = previous) {
        previous = std::max<int64_t>(id_at(i - 1), -1);  // of another thread's part it may be bad
        starts[id] = i;
        if (id - previous > 1) std::fill(starts + previous + 1, starts + id, i);
      }
    }
    if (end == n) std::fill(starts + id_at(n - 1) + 1, starts + num_rows + 1, n);
  });
}

}  // namespace tsr
