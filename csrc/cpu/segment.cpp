#include "segment.h"

#include <cmath>
#include <cstring>

#include "row_loops.h"
#include "segment_loops.h"

namespace tsr {
namespace {

constexpr const char* kSorted = "segment_reduce";
constexpr const char* kUnsorted = "unsorted_segment_reduce";
constexpr const char* kSortedBackward = "segment_reduce_backward";
constexpr const char* kUnsortedBackward = "unsorted_segment_reduce_backward";
// Segments given to the loops at a time: their divisors stay in the first-level cache.
constexpr int64_t kBlockSegments = 512;

// ---- Forward --------------------------------------------------------------------------------------------------------

template <class T>
void divide_integers(const ReduceArguments<T>& a, bool is_signed) {
  for (int64_t b = 0; b < a.bags; ++b) {
    const T count = static_cast<T>(a.starts[b + 1] - a.starts[b]);
    for (int64_t d = a.first_column; d < a.last_column; ++d) {
      T& total = a.out[b * a.dim + d];
      total = integer_mean(total, count, is_signed);
    }
  }
}

template <class T>
void reduce_block(ReduceArguments<T> a, Reduction reduction, bool is_signed) {
  using A = acc_t<T>;
  const ReduceLoops<T>& loops = reduce_loops<T>();
  if (reduction == Reduction::kProd) return loops.product(a);
  if (needs_data(reduction)) return loops.extreme(a);
  if constexpr (is_integer_v<T>) {
    loops.sum(a);
    if (reduction == Reduction::kMean) divide_integers(a, is_signed);
  } else {
    A divisors[kBlockSegments];
    if (reduction != Reduction::kSum) {
      for (int64_t b = 0; b < a.bags; ++b) {
        const A n = static_cast<A>(a.starts[b + 1] - a.starts[b]);
        divisors[b] = denominator(reduction, n, n);
      }
      a.divisors = divisors;
    }
    loops.sum(a);
  }
}

void reduce(const Tensor& data, const SegmentRows& rows, const RowShape& shape, Reduction reduction, bool unsorted,
            const Tensor& out) {
  const bool is_signed = is_signed_dtype(data.scalar_type());
  const int64_t dim = shape.elements, workers = segment_workers(rows, dim);
  dispatch_reduced(data.scalar_type(), kSorted, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const from = static_cast<const T*>(data.const_data_ptr());
    T* const to = static_cast<T*>(out.mutable_data_ptr());
    const int64_t* const starts = rows.starts.data();
    const std::vector<SegmentTask> tasks = segment_tasks(rows, dim, sizeof(T), workers);
    parallel_dynamic(static_cast<int64_t>(tasks.size()), workers, [&, from, to, starts, dim](int64_t, int64_t t) {
      const SegmentTask task = tasks[static_cast<size_t>(t)];
      for (int64_t s = task.first; s < task.last; s += kBlockSegments) {
        reduce_block<T>({from, dim, task.first_column, task.last_column, rows.order_or_null(), starts + s,
                         std::min(kBlockSegments, task.last - s), order_of<T>(reduction, is_signed), nullptr,
                         empty_segment<T>(reduction, unsorted, is_signed), to + s * dim},
                        reduction, is_signed);
      }
    });
  });
}

Tensor segment_reduce_cpu(const Tensor& data_, const std::optional<Tensor>& segment_ids,
                          const std::optional<Tensor>& offsets, std::optional<int64_t> num_segments,
                          int64_t reduction_) {
  const Reduction reduction = check_segment_reduce(data_, segment_ids, offsets, num_segments, reduction_);
  const Tensor data = as_contiguous(data_);
  const int64_t segments = count_segments(kSorted, segment_ids, offsets, num_segments);
  const Tensor out = new_empty(data, shape_of_segments(data, 1, segments), data.scalar_type(),
                               offsets ? Asked{} : asked_segments(kSorted, num_segments.has_value(), segments));
  const SegmentRows rows = sorted_segment_rows(kSorted, segment_ids, offsets, num_segments, data.size(0));
  reduce(data, rows, RowShape(data, 1), reduction, /*unsorted=*/false, out);
  return out;
}

Tensor unsorted_segment_reduce_cpu(const Tensor& data_, const Tensor& segment_ids, int64_t num_segments,
                                   int64_t reduction_) {
  const Reduction reduction = check_unsorted_segment_reduce(data_, segment_ids, num_segments, reduction_);
  const Tensor data = as_contiguous(data_);
  const RowShape shape(data, segment_ids.dim());
  const Tensor out = new_empty(data, shape_of_segments(data, segment_ids.dim(), num_segments), data.scalar_type(),
                               asked_segments(kUnsorted, /*given=*/true, num_segments));
  const SegmentRows rows = grouped_segment_rows(kUnsorted, kept_segment_ids(kUnsorted, segment_ids, num_segments),
                                                num_segments, shape.elements);
  reduce(data, rows, shape, reduction, /*unsorted=*/true, out);
  return out;
}

// ---- Gradient -------------------------------------------------------------------------------------------------------

// The least rows a thread should copy.
int64_t row_grain(int64_t dim) { return std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(dim, 1)); }

// What each of a segment's `count` rows receives, unless it is the segment's gradient itself, as for sums.
template <class T>
void divide_row(const T* grad, int64_t dim, int64_t count, Reduction reduction, T* to) {
  using A = acc_t<T>;
  const A n = static_cast<A>(count), by = denominator(reduction, n, n);
  for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(static_cast<A>(grad[d]) / by);
}

// What the rows of every segment receive: grad itself for sums, else grad divided, into `divided`.
template <class T>
const T* row_gradients(const T* grad, int64_t segments, int64_t dim, const int64_t* counts, Reduction reduction,
                       Buffer<T>& divided) {
  if (reduction == Reduction::kSum) return grad;
  divided = Buffer<T>(segments * dim);
  T* const to = divided.data();
  parallel_for(0, segments, row_grain(dim), [=](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      if (counts[s] == 0) continue;  // no row reads it
      divide_row(grad + s * dim, dim, counts[s], reduction, to + s * dim);
    }
  });
  return to;
}

// out[i] = grad[s], divided as row_gradients does, for the rows i of segment s. Some columns are divided at a time,
// which are then still in the first-level cache for all the segment's rows.
template <class T>
void spread_sorted(const T* grad, const SegmentRows& rows, int64_t dim, Reduction reduction, T* out) {
  constexpr int64_t kColumns = 1024;
  const int64_t* const starts = rows.starts.data();
  const int64_t segments = rows.segments, n = starts[segments];
  const bool divides = reduction != Reduction::kSum;
  parallel_for(0, n, row_grain(dim), [=](int64_t begin, int64_t end) {
    T divided[kColumns];
    int64_t s = std::upper_bound(starts, starts + segments + 1, begin) - starts - 1;
    for (int64_t first = begin, last; first < end; first = last, ++s) {
      last = std::min(starts[s + 1], end);
      if (first == last) continue;  // a segment without rows
      for (int64_t d = 0, width; d < dim; d += width) {
        width = divides ? std::min(dim - d, kColumns) : dim;
        const T* from = grad + s * dim + d;
        if (divides) {
          divide_row(from, width, starts[s + 1] - starts[s], reduction, divided);
          from = divided;
        }
        for (int64_t i = first; i < last; ++i) {
          std::memcpy(static_cast<void*>(out + i * dim + d), from, static_cast<size_t>(width) * sizeof(T));
        }
      }
    }
  });
}

// out[i] = from[ids[i]], or 0 where the id is the number of segments.
template <class T, class I>
void spread_unsorted(const T* from, const I* ids, int64_t n, int64_t segments, int64_t dim, T* out) {
  const int64_t ahead = rows_ahead(dim * static_cast<int64_t>(sizeof(T)));
  const size_t bytes = static_cast<size_t>(dim) * sizeof(T);
  parallel_for(0, n, row_grain(dim), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t later = i + ahead < end ? ids[i + ahead] : segments;
      if (later < segments) {
        const char* row = reinterpret_cast<const char*>(from + later * dim);
        for (size_t b = 0; b < std::min<size_t>(bytes, 512); b += 64) __builtin_prefetch(row + b);
      }
      void* to = static_cast<void*>(out + i * dim);
      if (ids[i] < segments) {
        std::memcpy(to, from + ids[i] * dim, bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
  });
}

// The gradient of max, min and prod, of the rows that are not left out.
template <class T>
void share_out(const T* grad, const T* data, const SegmentRows& rows, int64_t dim, Reduction reduction, T* out) {
  const int64_t workers = segment_workers(rows, dim);
  const std::vector<SegmentTask> tasks = segment_tasks(rows, dim, sizeof(T), workers);
  const ReduceBackwardLoops<T>& loops = reduce_backward_loops<T>();
  const auto loop = reduction == Reduction::kProd ? loops.product : loops.extreme;
  const int64_t* const starts = rows.starts.data();
  parallel_dynamic(static_cast<int64_t>(tasks.size()), workers, [&, starts, dim](int64_t, int64_t t) {
    const SegmentTask task = tasks[static_cast<size_t>(t)];
    loop({data, grad + task.first * dim, dim, task.first_column, task.last_column, rows.order_or_null(),
          starts + task.first, task.last - task.first, order_of<T>(reduction, false), out});
  });
}

Tensor segment_reduce_backward_cpu(const Tensor& grad_, const std::optional<Tensor>& data_,
                                   const std::optional<Tensor>& segment_ids, const std::optional<Tensor>& offsets,
                                   int64_t row_count, int64_t reduction_) {
  const Reduction reduction = check_segment_reduce_backward(grad_, data_, segment_ids, offsets, row_count, reduction_);
  const Tensor grad = as_contiguous(grad_);
  const std::optional<int64_t> segments = segment_ids ? std::optional<int64_t>(grad.size(0)) : std::nullopt;
  const SegmentRows rows = sorted_segment_rows(kSortedBackward, segment_ids, offsets, segments, row_count);
  const Tensor out = new_empty(grad, shape_with_rows(grad, row_count), grad.scalar_type());
  if (out.numel() == 0) return out;
  const int64_t dim = row_elements(grad);
  dispatch_float(grad.scalar_type(), kSortedBackward, "grad", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const from = grad.const_data_ptr<T>();
    T* const to = out.mutable_data_ptr<T>();
    if (needs_data(reduction)) {
      const Tensor data = as_contiguous(*data_);
      return share_out(from, data.const_data_ptr<T>(), rows, dim, reduction, to);
    }
    spread_sorted(from, rows, dim, reduction, to);
  });
  return out;
}

// The rows of each segment, by ids in [0, segments].
template <class I>
std::vector<int64_t> count_rows(const I* ids, int64_t n, int64_t segments) {
  std::vector<int64_t> counts(static_cast<size_t>(segments + 1), 0);
  int64_t* const count = counts.data();
  parallel_for(0, n, kItemGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) __atomic_fetch_add(count + ids[i], 1, __ATOMIC_RELAXED);
  });
  return counts;
}

Tensor unsorted_segment_reduce_backward_cpu(const Tensor& grad_, const std::optional<Tensor>& data_,
                                            const Tensor& segment_ids, int64_t reduction_) {
  const Reduction reduction = check_unsorted_segment_reduce_backward(grad_, data_, segment_ids, reduction_);
  const Tensor grad = as_contiguous(grad_);
  const int64_t segments = grad.size(0), dim = row_elements(grad), n = segment_ids.numel();
  const Tensor kept = kept_segment_ids(kUnsortedBackward, segment_ids, segments);
  const Tensor out = new_empty(grad, shape_of_rows(segment_ids, grad), grad.scalar_type());
  if (out.numel() == 0) return out;
  dispatch_float(grad.scalar_type(), kUnsortedBackward, "grad", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    const T* const from = grad.const_data_ptr<T>();
    T* const to = out.mutable_data_ptr<T>();
    dispatch_index(kept.scalar_type(), kUnsortedBackward, "segment_ids", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const I* const ids = kept.const_data_ptr<I>();
      if (!needs_data(reduction)) {
        const std::vector<int64_t> counts =
            reduction == Reduction::kSum ? std::vector<int64_t>() : count_rows(ids, n, segments);
        Buffer<T> divided;
        const T* const rows = row_gradients(from, segments, dim, counts.data(), reduction, divided);
        return spread_unsorted(rows, ids, n, segments, dim, to);
      }
      const Tensor data = as_contiguous(*data_);
      share_out(from, data.const_data_ptr<T>(), grouped_segment_rows(kUnsortedBackward, kept, segments, dim), dim,
                reduction, to);
      parallel_for(0, n, row_grain(dim), [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          if (ids[i] == segments) std::fill_n(to + i * dim, dim, T(0.0f));
        }
      });
    });
  });
  return out;
}

}  // namespace
}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "segment_reduce", &tsr::segment_reduce_cpu);
  TSR_IMPL(m, "segment_reduce_backward", &tsr::segment_reduce_backward_cpu);
  TSR_IMPL(m, "unsorted_segment_reduce", &tsr::unsorted_segment_reduce_cpu);
  TSR_IMPL(m, "unsorted_segment_reduce_backward", &tsr::unsorted_segment_reduce_backward_cpu);
}
