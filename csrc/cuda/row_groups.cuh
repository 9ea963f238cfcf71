// Entries grouped by the table row they name: the first half of every gradient with respect to a table.
//
// Sorting (row, position) pairs stably puts a row's entries side by side in their own order, so that pool_rows can let
// one team own each row: no atomics on floats, the same bits on every run.
#pragma once
#include "../cuda.h"
#include "primitives.cuh"

namespace tsr {

// Sorted pairs, of 32 bits where rows and entries fit. Entries that count for no row have the key `rows`: they are
// last.
struct RowGroups {
  int64_t entries;
  int64_t rows;
  bool wide;
  KeyedPositions<uint32_t> narrow_pairs{};
  KeyedPositions<uint64_t> wide_pairs{};
};

// Calls f with the pairs in their type.
template <class F>
void with_pairs(const RowGroups& groups, const F& f) {
  groups.wide ? f(groups.wide_pairs) : f(groups.narrow_pairs);
}

// Groups entries by indices, reporting those outside [0, rows); these and padding_idx count for no row.
RowGroups group_by_row(DeviceCall& call, ScalarType index_dtype, const void* indices, int64_t entries, int64_t rows,
                       int64_t padding_idx = -1);

// Every row's range of sorted entries: [rows + 1].
const int64_t* dense_offsets(DeviceCall& call, const RowGroups& groups);

// The rows that have entries, ascending: their number is read back. Row r of them has the sorted entries
// [offsets[r], offsets[r + 1]).
struct PresentRows {
  int64_t count;
  const int64_t* offsets;
};
PresentRows present_rows(DeviceCall& call, const RowGroups& groups);

// Writes the present rows' ids: [count], int32 or int64.
void write_row_ids(const DeviceCall& call, const RowGroups& groups, const PresentRows& present, const Tensor& ids);

}  // namespace tsr
