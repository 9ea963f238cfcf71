#include "device.cuh"
#include "row_groups.cuh"

namespace tsr {
namespace {

template <class K>
__global__ void dense_offsets_kernel(const K* keys, int64_t entries, int64_t rows, int64_t* offsets) {
  write_offsets(keys, entries, rows, offsets);
}

// One thread per row that has entries.
template <class K, class I>
__global__ void row_ids_kernel(const K* keys, PresentRows present, I* ids) {
  for (int64_t r = thread_index(); r < present.count; r += thread_count()) {
    ids[r] = static_cast<I>(keys[present.offsets[r]]);
  }
}

}  // namespace

const int64_t* dense_offsets(DeviceCall& call, const RowGroups& groups) {
  int64_t* const offsets = call.workspace<int64_t>(groups.rows + 1);
  with_pairs(groups, [&](const auto& pairs) {
    using K = std::remove_pointer_t<decltype(pairs.keys)>;
    launch(call, one_thread_each(groups.rows / kOffsetsPerThread + 1), dense_offsets_kernel<K>, pairs.keys,
           groups.entries, groups.rows, offsets);
  });
  return offsets;
}

RowRuns row_runs(DeviceCall& call, const RowGroups& groups) {
  int64_t* const offsets = call.workspace<int64_t>(groups.entries + 1);
  int64_t* const count = call.workspace<int64_t>(1);
  with_pairs(groups, [&](const auto& pairs) {
    using K = std::remove_pointer_t<decltype(pairs.keys)>;
    // The last run of real rows ends where the entries that count for no row begin, or after all.
    select_run_starts(call, pairs.keys, groups.entries, static_cast<K>(groups.rows), offsets, count);
  });
  return {offsets, count};
}

PresentRows present_rows(DeviceCall& call, const RowGroups& groups) {
  const RowRuns runs = row_runs(call, groups);
  return {call.read_back(runs.count, "the number of rows that have entries") - 1, runs.starts};
}

void write_row_ids(const DeviceCall& call, const RowGroups& groups, const PresentRows& present, const Tensor& ids) {
  with_pairs(groups, [&](const auto& pairs) {
    using K = std::remove_pointer_t<decltype(pairs.keys)>;
    dispatch_index(ids.scalar_type(), call.op(), "rows", [&](auto tag) {
      using I = typename decltype(tag)::type;
      launch(call, one_thread_each(present.count), row_ids_kernel<K, I>, pairs.keys, present,
             static_cast<I*>(ids.data_ptr()));
    });
  });
}

}  // namespace tsr
