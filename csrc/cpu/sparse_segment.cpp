#include "../sparse_segment.h"

#include <cmath>

#include "gradient.h"

namespace tsr {
namespace {

constexpr const char* kReduceOp = "sparse_segment_reduce";
constexpr const char* kGradOp = "sparse_segment_reduce_grad";
// Bags given to the row loops at a time: their divisors stay in the first-level cache.
constexpr int64_t kBlockBags = 512;

int64_t last_id_plus_one(const Tensor& segment_ids) {
  const int64_t n = segment_ids.size(0);
  if (n == 0) return 0;
  return dispatch_index(segment_ids.scalar_type(), kReduceOp, "segment_ids", [&](auto tag) -> int64_t {
    using I = typename decltype(tag)::type;
    return segments_up_to(kReduceOp, segment_ids.const_data_ptr<I>()[n - 1], n - 1);
  });
}

// I is the dtype of indices, R the type under which the row loops read it: ids are not negative once checked.
template <class T, class I, class R>
void reduce(const T* data, int64_t data_rows, int64_t dim, const I* indices, const int64_t* offsets, int64_t segments,
            Reduction reduction, T* out, FirstPosition& first_bad) {
  using A = acc_t<T>;
  const int64_t workers = workers_for((offsets[segments] + segments) * dim), tasks = workers == 1 ? 1 : workers * 16;
  const std::vector<int64_t> ranges = balanced_ranges(offsets, segments, tasks);
  const RowLoops<T, R>& loops = row_loops<T, R>();
  const bool stream = segments * dim * static_cast<int64_t>(sizeof(T)) >= kLargeBytes;
  const bool near = is_near(data_rows, dim * static_cast<int64_t>(sizeof(T)), offsets[segments]);
  parallel_dynamic(tasks, workers, [&, stream, near, offsets, dim, data, out, indices](int64_t, int64_t task) {
    const int64_t end = ranges[static_cast<size_t>(task + 1)];
    A divisors[kBlockBags];
    for (int64_t s = ranges[static_cast<size_t>(task)]; s < end; s += kBlockBags) {
      const int64_t bags = std::min(kBlockBags, end - s);
      report_bad_ids(indices, offsets[s], offsets[s + bags], data_rows, first_bad);
      if (first_bad.found()) continue;  // only to find an offender that comes before it
      if (reduction != Reduction::kSum) {
        for (int64_t b = 0; b < bags; ++b) {
          const A n = static_cast<A>(offsets[s + b + 1] - offsets[s + b]);
          divisors[b] = denominator(reduction, n, n);
        }
      }
      loops.pool({data, dim, reinterpret_cast<const R*>(indices), nullptr, offsets + s,
                  reduction == Reduction::kSum ? nullptr : divisors, bags, out + s * dim, stream, /*stride=*/0,
                  /*out_stride=*/0, /*fetch_end=*/offsets[segments], near});
    }
  });
}

// Segment ids as U, checked against [0, segments), and 1 / n_s or 1 / sqrt(n_s) for every segment (empty for kSum).
template <class T, class U>
struct SegmentTable {
  SegmentTable(const Tensor& segment_ids, int64_t segments, Reduction reduction);
  Buffer<U> ids;
  Buffer<acc_t<T>> weights;
};

template <class T, class U>
SegmentTable<T, U>::SegmentTable(const Tensor& segment_ids, int64_t segments, Reduction reduction)
    : ids(segment_ids.size(0)), weights(reduction == Reduction::kSum ? 0 : segments) {
  const int64_t n = segment_ids.size(0);
  std::vector<int64_t> counts(reduction == Reduction::kSum ? 0 : static_cast<size_t>(segments), 0);
  FirstPosition first_bad;
  dispatch_index(segment_ids.scalar_type(), kGradOp, "segment_ids", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const I* from = segment_ids.const_data_ptr<I>();
    U* to = ids.data();
    int64_t* count = counts.data();
    parallel_for(0, n, kItemGrain, [&, from, to, count](int64_t begin, int64_t end) {
      report_bad_ids(from, begin, end, segments, first_bad);
      if (first_bad.found()) return;
      for (int64_t i = begin; i < end; ++i) to[i] = static_cast<U>(from[i]);
      if (reduction == Reduction::kSum) return;
      // Ids are usually sorted: one atomic addition for a run of equal ones.
      for (int64_t i = begin, run; i < end; i = run) {
        for (run = i + 1; run < end && from[run] == from[i];) ++run;
        __atomic_fetch_add(count + from[i], run - i, __ATOMIC_RELAXED);
      }
    });
  });
  if (first_bad.found()) throw_bad_index(kGradOp, "segment_ids", segment_ids, first_bad.position(), segments);
  if (reduction == Reduction::kSum) return;
  for (int64_t s = 0; s < segments; ++s) {
    const acc_t<T> c = static_cast<acc_t<T>>(counts[static_cast<size_t>(s)]);
    weights[s] = acc_t<T>(1) / denominator(reduction, c, c);
  }
}

// What both gradient forms share: groups the items and hands them, with their meaning, to write(groups, meaning).
template <class T, class U, class F>
void with_groups(const Tensor& grad, const Tensor& indices, const Tensor& segment_ids, int64_t rows,
                 Reduction reduction, GradientRows written, const F& write) {
  const SegmentTable<T, U> table(segment_ids, grad.size(0), reduction);
  const RowGroups<U> groups(kGradOp, indices, table.ids.data(), rows, /*padding=*/-1, row_elements(grad), written);
  ItemMeaning<T, U> meaning{grad.const_data_ptr<T>(), row_elements(grad)};
  if (reduction != Reduction::kSum) meaning.segment_weights = table.weights.data();
  write(groups, meaning);
}

// allocate(shape) returns the contiguous tensor to write.
template <class Allocate>
Tensor dense_gradient(const Tensor& grad_, const Tensor& indices_, const Tensor& segment_ids_, int64_t rows,
                      int64_t reduction_, OutputMemory memory, const Allocate& allocate) {
  const Reduction reduction = check_sparse_segment_reduce_grad(grad_, indices_, segment_ids_, rows, reduction_);
  const Tensor grad = as_contiguous(grad_), indices = as_contiguous(indices_),
               segment_ids = as_contiguous(segment_ids_);
  const Tensor out = allocate(shape_with_rows(grad, rows));
  dispatch_float(grad.scalar_type(), kGradOp, "grad", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    dispatch_width(fits_32_bits(rows, indices.size(0), grad.size(0)), [&](auto width_tag) {
      using U = typename decltype(width_tag)::type;
      with_groups<T, U>(grad, indices, segment_ids, rows, reduction, GradientRows::kAll,
                        [&](const RowGroups<U>& groups, const ItemMeaning<T, U>& meaning) {
                          write_gradient<T, U, int64_t>(groups, meaning,
                                                        {out.mutable_data_ptr<T>(), nullptr, rows, memory});
                        });
    });
  });
  return out;
}

// allocate(shape of values) returns the contiguous tensors (values, rows) to write.
template <class Allocate>
std::tuple<Tensor, Tensor> compact_gradient(const Tensor& grad_, const Tensor& indices_, const Tensor& segment_ids_,
                                            int64_t num_rows, int64_t reduction_, OutputMemory memory,
                                            const Allocate& allocate) {
  const Reduction reduction =
      check_sparse_segment_reduce_grad(grad_, indices_, segment_ids_, num_rows, reduction_, "dense_output_dim0");
  const Tensor grad = as_contiguous(grad_), indices = as_contiguous(indices_),
               segment_ids = as_contiguous(segment_ids_);
  std::tuple<Tensor, Tensor> out;
  dispatch_float(grad.scalar_type(), kGradOp, "grad", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    dispatch_width(fits_32_bits(num_rows, indices.size(0), grad.size(0)), [&](auto width_tag) {
      using U = typename decltype(width_tag)::type;
      with_groups<T, U>(grad, indices, segment_ids, num_rows, reduction, GradientRows::kPresent,
                        [&](const RowGroups<U>& groups, const ItemMeaning<T, U>& meaning) {
                          out = allocate(shape_with_rows(grad, groups.groups()));
                          auto& [values, rows] = out;
                          dispatch_index(indices.scalar_type(), kGradOp, "indices", [&](auto index_tag) {
                            using I = typename decltype(index_tag)::type;
                            write_gradient<T, U, I>(groups, meaning,
                                                    {values.template mutable_data_ptr<T>(),
                                                     rows.template mutable_data_ptr<I>(), groups.groups(), memory});
                          });
                        });
    });
  });
  return out;
}

}  // namespace

Tensor sparse_segment_reduce_cpu(const Tensor& data_, const Tensor& indices_, const Tensor& segment_ids_,
                                 std::optional<int64_t> num_segments, int64_t reduction_) {
  const Reduction reduction = check_sparse_segment_reduce(data_, indices_, segment_ids_, num_segments, reduction_);
  const Tensor data = as_contiguous(data_), indices = as_contiguous(indices_),
               segment_ids = as_contiguous(segment_ids_);
  const int64_t segments = num_segments ? *num_segments : last_id_plus_one(segment_ids);
  const Tensor out = new_empty(data, shape_with_rows(data, segments), data.scalar_type(),
                               asked_segments(kReduceOp, num_segments.has_value(), segments));
  const Buffer<int64_t> offsets = offsets_of_sorted_ids(kReduceOp, segment_ids, segments, num_segments.has_value());
  FirstPosition first_bad;
  dispatch_float(data.scalar_type(), kReduceOp, "data", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    dispatch_index(indices.scalar_type(), kReduceOp, "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      using R = std::conditional_t<std::is_same_v<I, int32_t>, uint32_t, int64_t>;
      reduce<T, I, R>(data.const_data_ptr<T>(), data.size(0), row_elements(data), indices.const_data_ptr<I>(),
                      offsets.data(), segments, reduction, out.mutable_data_ptr<T>(), first_bad);
    });
  });
  if (first_bad.found()) throw_bad_index(kReduceOp, "indices", indices, first_bad.position(), data.size(0));
  return out;
}

Tensor sparse_segment_reduce_grad_cpu(const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                                      int64_t output_dim0, int64_t reduction) {
  return dense_gradient(grad, indices, segment_ids, output_dim0, reduction, OutputMemory::kFresh,
                        [&](const std::vector<int64_t>& shape) {
                          return new_empty(grad, shape, grad.scalar_type(), {kGradOp, "output_dim0", output_dim0});
                        });
}

void sparse_segment_reduce_grad_out_cpu(const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                                        int64_t output_dim0, int64_t reduction, Tensor out) {
  dense_gradient(grad, indices, segment_ids, output_dim0, reduction, OutputMemory::kReused,
                 [&](const std::vector<int64_t>& shape) {
                   check_dense_out(kGradOp, grad, indices, segment_ids, out, shape);
                   resize_(out, shape, {kGradOp, "output_dim0", output_dim0});
                   return out;
                 });
}

std::tuple<Tensor, Tensor> sparse_segment_reduce_grad_v2_cpu(const Tensor& grad, const Tensor& indices,
                                                             const Tensor& segment_ids, int64_t dense_output_dim0,
                                                             int64_t reduction) {
  return compact_gradient(grad, indices, segment_ids, dense_output_dim0, reduction, OutputMemory::kFresh,
                          [&](const std::vector<int64_t>& shape) {
                            return std::make_tuple(new_empty(grad, shape, grad.scalar_type()),
                                                   new_empty(indices, {shape[0]}, indices.scalar_type()));
                          });
}

void sparse_segment_reduce_grad_v2_out_cpu(const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                                           int64_t dense_output_dim0, int64_t reduction, Tensor values, Tensor rows) {
  check_compact_out(kGradOp, grad, indices, segment_ids, values, rows);
  compact_gradient(grad, indices, segment_ids, dense_output_dim0, reduction, OutputMemory::kReused,
                   [&](const std::vector<int64_t>& shape) {
                     resize_compact_out(kGradOp, grad, indices, segment_ids, values, rows, shape[0]);
                     return std::make_tuple(values, rows);
                   });
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "sparse_segment_reduce", &tsr::sparse_segment_reduce_cpu);
  TSR_IMPL(m, "sparse_segment_reduce_grad", &tsr::sparse_segment_reduce_grad_cpu);
  TSR_IMPL(m, "sparse_segment_reduce_grad_out", &tsr::sparse_segment_reduce_grad_out_cpu);
  TSR_IMPL(m, "sparse_segment_reduce_grad_v2", &tsr::sparse_segment_reduce_grad_v2_cpu);
  TSR_IMPL(m, "sparse_segment_reduce_grad_v2_out", &tsr::sparse_segment_reduce_grad_v2_out_cpu);
}
