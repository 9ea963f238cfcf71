// Entries grouped by the table row they name: the first half of every gradient with respect to a table.
//
// Sorting (row, source) pairs stably puts a row's entries side by side in their own order, so that pool_rows can let
// one team own each row: no atomics on floats, the same bits on every run. An entry's source says where its part of the
// gradient comes from: pool_rows takes the sources for its indices as they are.
#pragma once
#include "../cuda.h"
#include "pool.cuh"
#include "primitives.cuh"

namespace tsr {

// Sorted pairs of either width, told apart as a kernel runs.
struct SortedPairs {
  const void* keys;
  const void* values;
  bool wide;

  __device__ int64_t key(int64_t j) const { return element(keys, j); }
  __device__ int64_t value(int64_t j) const { return element(values, j); }

 private:
  __device__ int64_t element(const void* of, int64_t j) const {
    return wide ? static_cast<int64_t>(static_cast<const uint64_t*>(of)[j])
                : static_cast<int64_t>(static_cast<const uint32_t*>(of)[j]);
  }
};

// Sorted pairs, of 32 bits where rows and sources fit. Entries that count for no row have the key `rows`: they are
// last.
struct RowGroups {
  int64_t entries;
  int64_t rows;
  bool wide;
  Pairs<uint32_t> narrow_pairs{};
  Pairs<uint64_t> wide_pairs{};

  // The sources as pool_rows wants indices. Narrow ones fit in 31 bits, or are -1.
  ScalarType source_dtype() const { return wide ? ScalarType::Long : ScalarType::Int; }
  const void* sources() const { return wide ? static_cast<const void*>(wide_pairs.values) : narrow_pairs.values; }
  SortedPairs sorted() const {
    return {wide ? static_cast<const void*>(wide_pairs.keys) : narrow_pairs.keys, sources(), wide};
  }
};

// Calls f with the pairs in their type.
template <class F>
void with_pairs(const RowGroups& groups, const F& f) {
  groups.wide ? f(groups.wide_pairs) : f(groups.narrow_pairs);
}

// ---- Grouping -------------------------------------------------------------------------------------------------------

// One thread per entry.
template <class I, class K, class Source>
__global__ void pairs_kernel(const I* indices, int64_t entries, int64_t rows, int64_t padding_idx, bool report,
                             Argument argument, ErrorSink errors, Source source_of, Pairs<K> pairs) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const int64_t index = indices[i];
    const bool in_range = index >= 0 && index < rows;
    const bool is_left_out = index == rows && padding_idx == rows;
    if (!in_range && !is_left_out && report) errors.report(argument, Fault::kOutOfRange, i, index, rows);
    pairs.keys[i] = static_cast<K>(in_range && index != padding_idx ? index : rows);
    pairs.values[i] = static_cast<K>(source_of(i));
  }
}

struct Indices {
  ScalarType dtype;
  const void* data;  // [entries]
  int64_t entries;
  int64_t rows;              // what they must be below
  int64_t padding_idx = -1;  // may be `rows`: then that is allowed, and no row
  bool report = true;        // whether others outside [0, rows) are reported
  Argument argument = Argument::kIndices;
};

template <class K, class Source>
Pairs<K> sorted_pairs(DeviceCall& call, const Indices& indices, const Source& source_of) {
  const Pairs<K> pairs{call.workspace<K>(indices.entries), call.workspace<K>(indices.entries)};
  const Pairs<K> spare{call.workspace<K>(indices.entries), call.workspace<K>(indices.entries)};
  dispatch_index(indices.dtype, call.op(), "indices", [&](auto tag) {
    using I = typename decltype(tag)::type;
    launch(call, one_thread_each(indices.entries), pairs_kernel<I, K, Source>, static_cast<const I*>(indices.data),
           indices.entries, indices.rows, indices.padding_idx, indices.report, indices.argument, call.errors(),
           source_of, pairs);
  });
  int bits = 1;
  while (bits < 64 && (indices.rows >> bits) != 0) ++bits;
  return sort_pairs(call, pairs, spare, indices.entries, bits);
}

// Groups entries by indices, reporting those outside [0, rows); these and padding_idx count for no row. source_of(i),
// called on the device, is in [-1, sources).
template <class Source>
RowGroups group_by_row(DeviceCall& call, const Indices& indices, int64_t sources, const Source& source_of) {
  constexpr int64_t kLargestKey = std::numeric_limits<uint32_t>::max();
  constexpr int64_t kMostSources = std::numeric_limits<int32_t>::max();
  RowGroups groups{indices.entries, indices.rows, indices.rows > kLargestKey || sources > kMostSources};
  if (groups.wide) {
    groups.wide_pairs = sorted_pairs<uint64_t>(call, indices, source_of);
  } else {
    groups.narrow_pairs = sorted_pairs<uint32_t>(call, indices, source_of);
  }
  return groups;
}

// The source that every entry is to itself.
struct EntryItself {
  __device__ int64_t operator()(int64_t i) const { return i; }
};

// ---- Rows -----------------------------------------------------------------------------------------------------------

// Every row's range of sorted entries: [rows + 1].
const int64_t* dense_offsets(DeviceCall& call, const RowGroups& groups);

// Where the sorted entries of each row that has some begin, and after the last row's where those begin that count for
// no row, or the end: [count]. Nothing is read back.
struct RowRuns {
  const int64_t* starts;
  const int64_t* count;  // on the device
};
RowRuns row_runs(DeviceCall& call, const RowGroups& groups);

// The rows that have entries, ascending: their number is read back. Row r of them has the sorted entries
// [offsets[r], offsets[r + 1]).
struct PresentRows {
  int64_t count;
  const int64_t* offsets;
};
PresentRows present_rows(DeviceCall& call, const RowGroups& groups);

// Writes the ids of the rows that have entries: [count], int32 or int64.
void write_row_ids(const DeviceCall& call, const RowGroups& groups, const PresentRows& present, const Tensor& ids);

}  // namespace tsr
