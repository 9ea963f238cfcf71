#include "bags.cuh"
#include "row_groups.cuh"
#include "segment.cuh"
#include "segment_ids.cuh"

namespace tsr {
namespace {

// One thread per row.
template <class S>
__global__ void kept_ids_kernel(const S* segment_ids, int64_t rows, int64_t segments, ErrorSink errors, int64_t* kept) {
  for (int64_t i = thread_index(); i < rows; i += thread_count()) {
    const int64_t id = segment_ids[i];
    if (id >= segments) errors.report(Argument::kSegmentIds, Fault::kTooLarge, i, id, segments);
    kept[i] = id >= 0 && id < segments ? id : -1;
  }
}

// One thread per entry: from sources, or where there are none the entries' own numbers.
__global__ void order_kernel(const int32_t* sources, int64_t entries, int64_t* order) {
  for (int64_t e = thread_index(); e < entries; e += thread_count()) order[e] = sources == nullptr ? e : sources[e];
}

const int64_t* order_of_sources(DeviceCall& call, const void* sources, int64_t entries) {
  int64_t* const order = call.workspace<int64_t>(entries);
  launch(call, one_thread_each(entries), order_kernel, static_cast<const int32_t*>(sources), entries, order);
  return order;
}

}  // namespace

SegmentEntries sorted_segment_entries(DeviceCall& call, const std::optional<Tensor>& segment_ids,
                                      const std::optional<Tensor>& offsets, std::optional<int64_t> num_segments,
                                      int64_t rows) {
  const int64_t* const order = order_of_sources(call, nullptr, rows);
  if (offsets) return {offsets->size(0) - 1, rows, bag_offsets(call, *offsets, rows), order};
  const Tensor ids = as_contiguous(*segment_ids);
  const int64_t segments = segment_count(call, ids, num_segments);
  int64_t* const starts = call.workspace<int64_t>(segments + 1);
  dispatch_index(ids.scalar_type(), call.op(), "segment_ids", [&](auto tag) {
    using S = typename decltype(tag)::type;
    launch(call, one_thread_each(std::max(rows, segments / kOffsetsPerThread + 1)), segment_offsets_kernel<S>,
           call.data<S>(ids), rows, segments, num_segments.has_value(), call.errors(), starts);
  });
  return {segments, rows, starts, order};
}

const int64_t* kept_segment_ids(DeviceCall& call, const Tensor& segment_ids, int64_t num_segments) {
  const int64_t rows = segment_ids.numel();
  int64_t* const kept = call.workspace<int64_t>(rows);
  dispatch_index(segment_ids.scalar_type(), call.op(), "segment_ids", [&](auto tag) {
    using S = typename decltype(tag)::type;
    launch(call, one_thread_each(rows), kept_ids_kernel<S>, call.data<S>(segment_ids), rows, num_segments,
           call.errors(), kept);
  });
  return kept;
}

SegmentEntries grouped_segment_entries(DeviceCall& call, const int64_t* kept_ids, int64_t rows, int64_t num_segments) {
  Indices indices{ScalarType::Long, kept_ids, rows, num_segments};
  indices.report = false;
  const RowGroups groups = group_by_row(call, indices, rows, EntryItself());
  const void* const sources = groups.sources();
  return {num_segments, rows, dense_offsets(call, groups),
          groups.wide ? static_cast<const int64_t*>(sources) : order_of_sources(call, sources, rows)};
}

}  // namespace tsr
