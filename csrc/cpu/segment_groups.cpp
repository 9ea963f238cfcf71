#include "row_groups.h"
#include "segment.h"

namespace tsr {
namespace {

template <class U>
SegmentRows group(const char* op, const Tensor& kept_ids, int64_t segments, int64_t row_elements) {
  const RowGroups<U> groups(op, kept_ids, nullptr, segments + 1, /*padding=*/segments, row_elements,
                            GradientRows::kPresent);
  const std::vector<Slice>& slices = groups.slices();
  int64_t entries = 0;
  for (const Slice& slice : slices) entries = std::max(entries, slice.end);
  SegmentRows rows{Buffer<int64_t>(segments + 1, asked_segments(op, /*given=*/true, segments)), segments,
                   Buffer<int64_t>(entries)};
  int64_t* const starts = rows.starts.data();
  int64_t* const order = rows.order.data();
  const Item<U>* const items = groups.items();
  std::fill_n(starts, segments + 1, 0);
  parallel_tasks(static_cast<int64_t>(slices.size()), [&, starts, order, items](int64_t task) {
    const Slice& slice = slices[static_cast<size_t>(task)];
    for (int64_t e = slice.begin; e < slice.end; ++e) {
      order[e] = static_cast<int64_t>(items[e].payload);
      // Where each segment ends: its last entry writes last.
      starts[static_cast<int64_t>(items[e].row) + 1] = e + 1;
    }
  });
  for (int64_t s = 1; s <= segments; ++s) starts[s] = std::max(starts[s], starts[s - 1]);
  return rows;
}

}  // namespace

int64_t count_segments(const char* op, const std::optional<Tensor>& segment_ids, const std::optional<Tensor>& offsets,
                       std::optional<int64_t> num_segments) {
  if (offsets) return offsets->size(0) - 1;
  const int64_t n = segment_ids->size(0);
  if (num_segments || n == 0) return num_segments.value_or(0);
  return dispatch_index(segment_ids->scalar_type(), op, "segment_ids", [&](auto tag) {
    using I = typename decltype(tag)::type;
    return segments_up_to(op, segment_ids->const_data_ptr<I>()[(n - 1) * segment_ids->stride(0)], n - 1);
  });
}

SegmentRows sorted_segment_rows(const char* op, const std::optional<Tensor>& segment_ids_,
                                const std::optional<Tensor>& offsets, std::optional<int64_t> num_segments,
                                int64_t rows) {
  if (offsets) return {checked_offsets(op, *offsets, rows), offsets->size(0) - 1, {}};
  const Tensor segment_ids = as_contiguous(*segment_ids_);
  const int64_t segments = count_segments(op, segment_ids, std::nullopt, num_segments);
  return {offsets_of_sorted_ids(op, segment_ids, segments, num_segments.has_value()), segments, {}};
}

Tensor kept_segment_ids(const char* op, const Tensor& segment_ids_, int64_t num_segments) {
  const Tensor segment_ids = as_contiguous(segment_ids_);
  const int64_t n = segment_ids.numel();
  const Tensor kept = new_empty(segment_ids, {n}, num_segments <= INT32_MAX ? ScalarType::Int : ScalarType::Long);
  FirstPosition first_bad;
  dispatch_index(segment_ids.scalar_type(), op, "segment_ids", [&](auto from_tag) {
    using I = typename decltype(from_tag)::type;
    dispatch_index(kept.scalar_type(), op, "segment_ids", [&](auto to_tag) {
      using K = typename decltype(to_tag)::type;
      const I* from = segment_ids.const_data_ptr<I>();
      K* to = kept.mutable_data_ptr<K>();
      parallel_for(0, n, kItemGrain, [&, from, to, num_segments](int64_t begin, int64_t end) {
        bool bad = false;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t id = from[i];
          bad |= id >= num_segments;
          to[i] = static_cast<K>(id < 0 ? num_segments : id);
        }
        if (!bad) return;
        while (from[begin] < num_segments) ++begin;
        first_bad.report(begin);
      });
    });
    if (!first_bad.found()) return;
    const int64_t position = first_bad.position();
    throw std::invalid_argument(message(op, ": segment_ids[", position, "] must be below num_segments = ", num_segments,
                                        ", got ", segment_ids.const_data_ptr<I>()[position]));
  });
  return kept;
}

SegmentRows grouped_segment_rows(const char* op, const Tensor& kept_ids, int64_t num_segments, int64_t row_elements) {
  const bool narrow = std::max(num_segments + 1, kept_ids.size(0)) < (int64_t{1} << 32);
  return narrow ? group<uint32_t>(op, kept_ids, num_segments, row_elements)
                : group<int64_t>(op, kept_ids, num_segments, row_elements);
}

std::vector<SegmentTask> segment_tasks(const SegmentRows& rows, int64_t dim, int64_t element_size, int64_t workers) {
  if (workers == 1) return {{0, rows.segments, 0, dim}};
  const int64_t count = workers * 16;
  const int64_t* const starts = rows.starts.data();
  const std::vector<int64_t> ranges = balanced_ranges(starts, rows.segments, count);
  const int64_t fair = (starts[rows.segments] + rows.segments) / count + 1;
  // Whole cache lines, and no more parts than help.
  const int64_t line = std::max<int64_t>(1, 64 / element_size);
  const int64_t width = ((dim + 2 * workers - 1) / (2 * workers) + line - 1) / line * line;
  std::vector<SegmentTask> tasks;
  for (int64_t range = 0; range < count; ++range) {
    int64_t first = ranges[static_cast<size_t>(range)];
    const int64_t last = ranges[static_cast<size_t>(range + 1)];
    if (starts[last] - starts[first] > 2 * fair) {
      for (int64_t s = first; s < last; ++s) {
        if (starts[s + 1] - starts[s] <= fair) continue;
        if (first < s) tasks.push_back({first, s, 0, dim});
        for (int64_t d = 0; d < dim; d += width) tasks.push_back({s, s + 1, d, std::min(d + width, dim)});
        first = s + 1;
      }
    }
    if (first < last) tasks.push_back({first, last, 0, dim});
  }
  return tasks;
}

}  // namespace tsr
