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
  constexpr int64_t kBlock = 1024;  // looked at twice while it is in the first-level cache
  const uint64_t last_row = static_cast<uint64_t>(num_rows) - 1;
  parallel_for(0, n, kItemGrain, [=, &first_bad](int64_t begin, int64_t end) {
    int64_t before = begin > 0 ? static_cast<int64_t>(ids[begin - 1]) : -1;
    // Whether [block, to) are rows that do not decrease; as in all_below, without branches.
    const auto is_sound = [=](int64_t block, int64_t to, int64_t before) {
      uint64_t previous = static_cast<uint64_t>(before), signs = 0;
      for (int64_t i = block; i < to; ++i) {
        const uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
        signs |= id | (last_row - id) | (id - previous);
        previous = id;
      }
      return signs >> 63 == 0;
    };
    for (int64_t block = begin, block_end; block < end; block = block_end) {
      block_end = std::min(block + kBlock, end);
      if (!is_sound(block, block_end, before)) {
        for (; is_sound(block, block + 1, before); ++block) before = static_cast<int64_t>(ids[block]);
        return first_bad.report(block);
      }
      before = std::max<int64_t>(before, -1);  // of another thread's part it may be bad
      const int64_t last = static_cast<int64_t>(ids[block_end - 1]);
      // A row that began in an earlier block has its start from there.
      while (block < block_end && static_cast<int64_t>(ids[block]) == before) ++block;
      // From the last item on, so that a row's first item writes last: no branch on whether an id repeats, which
      // mispredicts.
      int64_t next = last;
      for (int64_t i = block_end - 1; i >= block; --i) {
        const int64_t id = static_cast<int64_t>(ids[i]);
        if (next - id > 1) std::fill(starts + id + 1, starts + next, i + 1);
        starts[id] = i;
        next = id;
      }
      if (next - before > 1) std::fill(starts + before + 1, starts + next, block);
      before = last;
    }
    if (end == n) std::fill(starts + before + 1, starts + num_rows + 1, n);
  });
}

}  // namespace tsr
