// Many keys at a time: their places are computed first, so that memory is on its way when it is looked at.
#pragma once
#include "table_view.h"

namespace tsr {

// Keys in flight: enough to hide the memory's latency, few enough for the first cache.
constexpr int64_t kFindBlock = 64;
// A key, 15 to 40 ns, costs about as much as this many elements moved.
constexpr int64_t kWorkPerKey = 48;

// Calls found(i, row) for i in [begin, end), in order; row is -1 where ids[i] is missing.
template <class Id, class Found>
void find_each(const TableView& table, const Id* ids, int64_t begin, int64_t end, const Found& found) {
  KeyPlace places[kFindBlock];
  int32_t likely[kFindBlock];
  for (int64_t first = begin; first < end; first += kFindBlock) {
    const int64_t n = std::min(kFindBlock, end - first);
    for (int64_t k = 0; k < n; ++k) {
      places[k] = table.place(static_cast<int64_t>(ids[first + k]));
      __builtin_prefetch(table.bucket(places[k].region + places[k].home));
    }
    for (int64_t k = 0; k < n; ++k) {
      const int32_t* bucket = table.bucket(places[k].region + places[k].home);
      const uint32_t slots = slots_with(bucket, places[k].tag);
      likely[k] = slots == 0 ? -1 : bucket[kRowsWord + lowest_bit(slots)];
      if (static_cast<uint32_t>(likely[k]) < static_cast<uint64_t>(table.rows)) {
        __builtin_prefetch(table.entries + 2 * static_cast<int64_t>(likely[k]));
      }
    }
    for (int64_t k = 0; k < n; ++k) {
      const int64_t key = static_cast<int64_t>(ids[first + k]);
      found(first + k, table.has(likely[k], key) ? static_cast<int64_t>(likely[k]) : find_row(table, places[k], key));
    }
  }
}

}  // namespace tsr
