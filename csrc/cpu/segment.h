// Rows by segment, for reductions that take every row of a tensor.
#pragma once
#include "bags.h"

namespace tsr {

// Segment s has the entries [starts[s], starts[s + 1]); entry e is row order[e], or row e where the rows are sorted.
struct SegmentRows {
  Buffer<int64_t> starts;  // [segments + 1]
  int64_t segments = 0;
  Buffer<int64_t> order;  // of the rows that are not left out, or empty

  const int64_t* order_or_null() const { return order.data(); }
};

// num_segments, or what offsets or the last of sorted ids say.
int64_t count_segments(const char* op, const std::optional<Tensor>& segment_ids, const std::optional<Tensor>& offsets,
                       std::optional<int64_t> num_segments);

// The rows of segments given by sorted ids or by offsets; num_segments as in segment_reduce.
SegmentRows sorted_segment_rows(const char* op, const std::optional<Tensor>& segment_ids,
                                const std::optional<Tensor>& offsets, std::optional<int64_t> num_segments,
                                int64_t rows);

// The ids as a contiguous vector, int32 where num_segments fits, with num_segments for those below 0. Throws for ids
// >= num_segments.
Tensor kept_segment_ids(const char* op, const Tensor& segment_ids, int64_t num_segments);

// The rows of segments given by kept_segment_ids; row_elements: the elements of a row of data.
SegmentRows grouped_segment_rows(const char* op, const Tensor& kept_ids, int64_t num_segments, int64_t row_elements);

// A part of the work that one thread does: columns of neighbouring segments. Segments that are too long for one thread
// are cut by columns, which changes no bits.
struct SegmentTask {
  int64_t first, last;
  int64_t first_column, last_column;
};

std::vector<SegmentTask> segment_tasks(const SegmentRows& rows, int64_t dim, int64_t element_size, int64_t workers);

inline int64_t segment_workers(const SegmentRows& rows, int64_t dim) {
  return workers_for((rows.starts[rows.segments] + rows.segments) * dim);
}

}  // namespace tsr
