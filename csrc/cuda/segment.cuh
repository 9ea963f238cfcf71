// Rows by segment, for reductions that take every row of a tensor.
#pragma once
#include "../cuda.h"
#include "../segment.h"
#include "pool.cuh"

namespace tsr {

// Segment s has the entries [offsets[s], offsets[s + 1]); entry e is row order[e].
struct SegmentEntries {
  int64_t segments;
  int64_t rows;  // and entries, at most
  const int64_t* offsets;
  const int64_t* order;
};

// The entries of segments given by sorted ids or by offsets; num_segments as in segment_reduce: None is read back.
SegmentEntries sorted_segment_entries(DeviceCall& call, const std::optional<Tensor>& segment_ids,
                                      const std::optional<Tensor>& offsets, std::optional<int64_t> num_segments,
                                      int64_t rows);

// The segment of each row, or -1 for those left out: [rows]. Reports ids >= num_segments.
const int64_t* kept_segment_ids(DeviceCall& call, const Tensor& segment_ids, int64_t num_segments);
SegmentEntries grouped_segment_entries(DeviceCall& call, const int64_t* kept_ids, int64_t rows, int64_t num_segments);

// The pooling of data's rows by segment, but for where it goes.
inline Pooling pooling_of(const SegmentEntries& entries, ScalarType dtype, const void* data, int64_t columns) {
  Pooling pooling;
  pooling.dtype = dtype;
  pooling.table = data;
  pooling.rows = entries.rows;
  pooling.columns = columns;
  pooling.indices = entries.order;
  pooling.entries = entries.rows;
  pooling.offsets = entries.offsets;
  pooling.bags = entries.segments;
  pooling.report = false;  // the order is our own
  return pooling;
}

}  // namespace tsr
