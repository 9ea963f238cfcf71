#include "../cuda.h"
#include "../segment.h"
#include "device.cuh"
#include "pool.cuh"
#include "row_groups.cuh"

namespace tsr {
namespace {

// ---- Forward --------------------------------------------------------------------------------------------------------

// One thread per entry checks its segment id, then one thread per segment finds where its entries begin. Where the last
// id gave the number of segments, a larger one is only out of order.
template <class S>
__global__ void segment_offsets_kernel(const S* segment_ids, int64_t entries, int64_t segments, bool is_given,
                                       ErrorSink errors, int64_t* offsets) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const int64_t id = segment_ids[i];
    if (id < 0) {
      errors.report(Argument::kSegmentIds, Fault::kNegative, i, id, 0);
    } else if (i > 0 && id < segment_ids[i - 1]) {
      errors.report(Argument::kSegmentIds, Fault::kUnsorted, i, id, segment_ids[i - 1]);
    } else if (is_given && id >= segments) {
      errors.report(Argument::kSegmentIds, Fault::kTooLarge, i, id, segments);
    }
  }
  for (int64_t s = thread_index(); s <= segments; s += thread_count()) {
    offsets[s] = lower_bound(segment_ids, entries, s);
  }
}

// num_segments, or the last id + 1.
int64_t segment_count(const DeviceCall& call, const Tensor& segment_ids, std::optional<int64_t> num_segments) {
  if (num_segments) return *num_segments;
  const int64_t entries = segment_ids.size(0);
  if (entries == 0) return 0;
  const int64_t last = dispatch_index(segment_ids.scalar_type(), call.op(), "segment_ids", [&](auto tag) -> int64_t {
    using S = typename decltype(tag)::type;
    return call.read_back(static_cast<const S*>(segment_ids.data_ptr()) + entries - 1,
                          "the last segment id, which num_segments=None asks for,");
  });
  TSR_CHECK_VALUE(last >= 0, call.op(), ": segment_ids[", entries - 1, "] must be >= 0, got ", last);
  return last + 1;
}

Tensor sparse_segment_reduce_cuda(const Tensor& data, const Tensor& indices, const Tensor& segment_ids,
                                  std::optional<int64_t> num_segments, int64_t reduction_value) {
  DeviceCall call("sparse_segment_reduce", data);
  const Reduction reduction = check_sparse_segment_reduce(data, indices, segment_ids, num_segments, reduction_value);
  const Tensor ids = as_contiguous(segment_ids);
  const int64_t segments = segment_count(call, ids, num_segments);
  const Tensor out = call.empty(shape_with_rows(data, segments), data.scalar_type());
  int64_t* const offsets = call.workspace<int64_t>(segments + 1);
  const int64_t entries = indices.size(0);
  dispatch_index(ids.scalar_type(), call.op(), "segment_ids", [&](auto tag) {
    using S = typename decltype(tag)::type;
    launch(call, one_thread_each(std::max(entries, segments + 1)), segment_offsets_kernel<S>, call.data<S>(ids),
           entries, segments, num_segments.has_value(), call.errors(), offsets);
  });
  Pooling pooling;
  pooling.dtype = data.scalar_type();
  pooling.table = call.data(data);
  pooling.rows = data.size(0);
  pooling.columns = row_elements(data);
  pooling.index_dtype = indices.scalar_type();
  pooling.indices = call.data(indices);
  pooling.entries = entries;
  pooling.offsets = offsets;
  pooling.bags = segments;
  pooling.out = out.data_ptr();
  pooling.divisor = divisor_of(reduction);
  pool_rows(call, pooling);
  return out;
}

// ---- Gradient -------------------------------------------------------------------------------------------------------

// One thread per entry counts it for its segment. Integers: the order does not matter.
template <class S>
__global__ void segment_counts_kernel(const S* segment_ids, int64_t entries, int64_t segments,
                                      unsigned long long* counts) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const int64_t id = segment_ids[i];
    if (id >= 0 && id < segments) atomicAdd(&counts[id], 1ull);
  }
}

struct SegmentScales {
  Reduction reduction;
  const unsigned long long* counts;  // null for sums
  template <class A>
  __device__ A at(int64_t segment, type_tag<A>) const {
    const A n = static_cast<A>(counts[segment]);
    return A(1) / (reduction == Reduction::kMean ? n : sqrt(n));
  }
};

// One thread per sorted entry looks up the row of grad that it receives, and that row's scale.
template <class A, class S, class K>
__global__ void segment_sources_kernel(const K* positions, int64_t entries, const S* segment_ids, int64_t segments,
                                       SegmentScales scales, ErrorSink errors, int64_t* sources, A* weights) {
  for (int64_t j = thread_index(); j < entries; j += thread_count()) {
    const int64_t i = static_cast<int64_t>(positions[j]);
    const int64_t id = segment_ids[i];
    const bool in_range = id >= 0 && id < segments;
    if (!in_range) errors.report(Argument::kSegmentIds, Fault::kOutOfRange, i, id, segments);
    sources[j] = in_range ? id : -1;
    if (scales.counts != nullptr) weights[j] = in_range ? scales.at(id, type_tag<A>{}) : A(0);
  }
}

template <class S>
const unsigned long long* segment_counts(DeviceCall& call, const Tensor& ids, int64_t segments) {
  unsigned long long* const counts = call.workspace<unsigned long long>(segments);
  fill_bytes(call.stream(), counts, 0, segments * sizeof(*counts));
  launch(call, one_thread_each(ids.size(0)), segment_counts_kernel<S>, static_cast<const S*>(ids.data_ptr()),
         ids.size(0), segments, counts);
  return counts;
}

// A gradient's entries, grouped by the row they add to.
struct SegmentGradient {
  RowGroups groups;
  Pooling pooling;  // all but the rows it writes
};

SegmentGradient group_segment_gradient(DeviceCall& call, const Tensor& grad, const Tensor& indices,
                                       const Tensor& segment_ids, int64_t output_dim0, Reduction reduction) {
  const int64_t entries = indices.size(0), segments = grad.size(0);
  const RowGroups groups = group_by_row(call, indices.scalar_type(), call.data(indices), entries, output_dim0);
  int64_t* const sources = call.workspace<int64_t>(entries);
  Pooling pooling;
  pooling.dtype = grad.scalar_type();
  pooling.table = call.data(grad);
  pooling.rows = segments;
  pooling.columns = row_elements(grad);
  pooling.indices = sources;
  pooling.entries = entries;
  pooling.report = false;  // sources are our own
  const Tensor ids = as_contiguous(segment_ids);
  call.data(ids);
  dispatch_float(grad.scalar_type(), call.op(), "grad", [&](auto value_tag) {
    using A = acc_t<typename decltype(value_tag)::type>;
    dispatch_index(ids.scalar_type(), call.op(), "segment_ids", [&](auto index_tag) {
      using S = typename decltype(index_tag)::type;
      SegmentScales scales{reduction, nullptr};
      A* weights = nullptr;
      if (reduction != Reduction::kSum) {
        scales.counts = segment_counts<S>(call, ids, segments);
        weights = call.workspace<A>(entries);
      }
      with_pairs(groups, [&](const auto& pairs) {
        using K = std::remove_pointer_t<decltype(pairs.keys)>;
        launch(call, one_thread_each(entries), segment_sources_kernel<A, S, K>, pairs.positions, entries,
               static_cast<const S*>(ids.data_ptr()), segments, scales, call.errors(), sources, weights);
      });
      pooling.weights = weights;
    });
  });
  return {groups, pooling};
}

void write_dense_gradient(DeviceCall& call, SegmentGradient& gradient, const Tensor& out) {
  gradient.pooling.offsets = dense_offsets(call, gradient.groups);
  gradient.pooling.bags = gradient.groups.rows;
  gradient.pooling.out = out.data_ptr();
  pool_rows(call, gradient.pooling);
}

void write_present_rows(DeviceCall& call, SegmentGradient& gradient, const PresentRows& present, const Tensor& values,
                        const Tensor& rows) {
  write_row_ids(call, gradient.groups, present, rows);
  gradient.pooling.offsets = present.offsets;
  gradient.pooling.bags = present.count;
  gradient.pooling.out = values.data_ptr();
  pool_rows(call, gradient.pooling);
}

Tensor sparse_segment_reduce_grad_cuda(const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                                       int64_t output_dim0, int64_t reduction_value) {
  DeviceCall call("sparse_segment_reduce_grad", grad);
  const Reduction reduction =
      check_sparse_segment_reduce_grad(grad, indices, segment_ids, output_dim0, reduction_value);
  SegmentGradient gradient = group_segment_gradient(call, grad, indices, segment_ids, output_dim0, reduction);
  const Tensor out = call.empty(shape_with_rows(grad, output_dim0), grad.scalar_type());
  write_dense_gradient(call, gradient, out);
  return out;
}

void sparse_segment_reduce_grad_out_cuda(const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                                         int64_t output_dim0, int64_t reduction_value, Tensor out) {
  DeviceCall call("sparse_segment_reduce_grad", grad);
  const Reduction reduction =
      check_sparse_segment_reduce_grad(grad, indices, segment_ids, output_dim0, reduction_value);
  check_out(call.op(), "out", out, "grad", grad);
  SegmentGradient gradient = group_segment_gradient(call, grad, indices, segment_ids, output_dim0, reduction);
  resize_(out, shape_with_rows(grad, output_dim0));
  write_dense_gradient(call, gradient, out);
}

std::tuple<Tensor, Tensor> sparse_segment_reduce_grad_v2_cuda(const Tensor& grad, const Tensor& indices,
                                                              const Tensor& segment_ids, int64_t dense_output_dim0,
                                                              int64_t reduction_value) {
  DeviceCall call("sparse_segment_reduce_grad", grad);
  const Reduction reduction =
      check_sparse_segment_reduce_grad(grad, indices, segment_ids, dense_output_dim0, reduction_value);
  SegmentGradient gradient = group_segment_gradient(call, grad, indices, segment_ids, dense_output_dim0, reduction);
  const PresentRows present = present_rows(call, gradient.groups);
  const Tensor values = call.empty(shape_with_rows(grad, present.count), grad.scalar_type());
  const Tensor rows = call.empty({present.count}, indices.scalar_type());
  write_present_rows(call, gradient, present, values, rows);
  return {values, rows};
}

void sparse_segment_reduce_grad_v2_out_cuda(const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                                            int64_t dense_output_dim0, int64_t reduction_value, Tensor values,
                                            Tensor rows) {
  DeviceCall call("sparse_segment_reduce_grad", grad);
  const Reduction reduction =
      check_sparse_segment_reduce_grad(grad, indices, segment_ids, dense_output_dim0, reduction_value);
  check_out(call.op(), "values", values, "grad", grad);
  check_out(call.op(), "rows", rows, "indices", indices);
  SegmentGradient gradient = group_segment_gradient(call, grad, indices, segment_ids, dense_output_dim0, reduction);
  const PresentRows present = present_rows(call, gradient.groups);
  resize_(values, shape_with_rows(grad, present.count));
  resize_(rows, {present.count});
  write_present_rows(call, gradient, present, values, rows);
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "sparse_segment_reduce", &tsr::sparse_segment_reduce_cuda);
  TSR_IMPL(m, "sparse_segment_reduce_grad", &tsr::sparse_segment_reduce_grad_cuda);
  TSR_IMPL(m, "sparse_segment_reduce_grad_out", &tsr::sparse_segment_reduce_grad_out_cuda);
  TSR_IMPL(m, "sparse_segment_reduce_grad_v2", &tsr::sparse_segment_reduce_grad_v2_cuda);
  TSR_IMPL(m, "sparse_segment_reduce_grad_v2_out", &tsr::sparse_segment_reduce_grad_v2_out_cuda);
}
