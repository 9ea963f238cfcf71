#include "../cuda.h"
#include "../sparse_segment.h"
#include "device.cuh"
#include "pool.cuh"
#include "row_groups.cuh"
#include "segment_ids.cuh"

namespace tsr {
namespace {

// ---- Forward --------------------------------------------------------------------------------------------------------

Tensor sparse_segment_reduce_cuda(const Tensor& data, const Tensor& indices, const Tensor& segment_ids,
                                  std::optional<int64_t> num_segments, int64_t reduction_value) {
  const Reduction reduction = check_sparse_segment_reduce(data, indices, segment_ids, num_segments, reduction_value);
  DeviceCall call("sparse_segment_reduce", data);
  const Tensor ids = as_contiguous(segment_ids);
  const int64_t segments = segment_count(call, ids, num_segments);
  const Tensor out = call.empty(shape_with_rows(data, segments), data.scalar_type());
  int64_t* const offsets = call.workspace<int64_t>(segments + 1);
  const int64_t entries = indices.size(0);
  dispatch_index(ids.scalar_type(), call.op(), "segment_ids", [&](auto tag) {
    using S = typename decltype(tag)::type;
    launch(call, one_thread_each(std::max(entries, segments / kOffsetsPerThread + 1)), segment_offsets_kernel<S>,
           call.data<S>(ids), entries, segments, num_segments.has_value(), call.errors(), offsets);
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

// One thread per segment.
template <class A>
__global__ void segment_scales_kernel(const unsigned long long* counts, int64_t segments, Reduction reduction,
                                      A* scales) {
  for (int64_t s = thread_index(); s < segments; s += thread_count()) {
    const A n = static_cast<A>(counts[s]);
    scales[s] = n == A(0) ? A(0) : A(1) / (reduction == Reduction::kMean ? n : sqrt(n));
  }
}

// What a segment's row of grad counts in mode mean or sqrt_n: [segments].
template <class A, class S>
const A* segment_scales(DeviceCall& call, const S* segment_ids, int64_t entries, int64_t segments,
                        Reduction reduction) {
  unsigned long long* const counts = call.workspace<unsigned long long>(segments);
  fill_bytes(call.stream(), counts, 0, segments * sizeof(*counts));
  launch(call, one_thread_each(entries), segment_counts_kernel<S>, segment_ids, entries, segments, counts);
  A* const scales = call.workspace<A>(segments);
  launch(call, one_thread_each(segments), segment_scales_kernel<A>, counts, segments, reduction, scales);
  return scales;
}

// The row of grad that an entry receives, or -1.
template <class S>
struct SegmentOf {
  const S* segment_ids;
  int64_t segments;
  ErrorSink errors;
  __device__ int64_t operator()(int64_t i) const {
    const int64_t id = segment_ids[i];
    if (id >= 0 && id < segments) return id;
    errors.report(Argument::kSegmentIds, Fault::kOutOfRange, i, id, segments);
    return -1;
  }
};

// A gradient's entries, grouped by the row they add to.
struct SegmentGradient {
  RowGroups groups;
  Pooling pooling;  // all but the rows it writes
};

SegmentGradient group_segment_gradient(DeviceCall& call, const Tensor& grad, const Tensor& indices,
                                       const Tensor& segment_ids, int64_t output_dim0, Reduction reduction) {
  const int64_t entries = indices.size(0), segments = grad.size(0);
  const Indices rows{indices.scalar_type(), call.data(indices), entries, output_dim0};
  SegmentGradient gradient;
  dispatch_index(segment_ids.scalar_type(), call.op(), "segment_ids", [&](auto index_tag) {
    using S = typename decltype(index_tag)::type;
    const S* const ids = call.data<S>(segment_ids);
    gradient.groups = group_by_row(call, rows, segments, SegmentOf<S>{ids, segments, call.errors()});
    if (reduction == Reduction::kSum) return;
    dispatch_float(grad.scalar_type(), call.op(), "grad", [&](auto value_tag) {
      using A = acc_t<typename decltype(value_tag)::type>;
      gradient.pooling.scales = segment_scales<A>(call, ids, entries, segments, reduction);
    });
  });
  Pooling& pooling = gradient.pooling;
  pooling.dtype = grad.scalar_type();
  pooling.table = call.data(grad);
  pooling.rows = segments;
  pooling.columns = row_elements(grad);
  pooling.index_dtype = gradient.groups.source_dtype();
  pooling.indices = gradient.groups.sources();
  pooling.entries = entries;
  pooling.report = false;  // sources are our own
  return gradient;
}

void write_dense_gradient(DeviceCall& call, SegmentGradient& gradient, const Tensor& out) {
  if (out.numel() == 0) return;
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
  const Reduction reduction =
      check_sparse_segment_reduce_grad(grad, indices, segment_ids, output_dim0, reduction_value);
  DeviceCall call("sparse_segment_reduce_grad", grad);
  call.asks("output_dim0", output_dim0);
  const Tensor out = call.empty(shape_with_rows(grad, output_dim0), grad.scalar_type());
  SegmentGradient gradient = group_segment_gradient(call, grad, indices, segment_ids, output_dim0, reduction);
  write_dense_gradient(call, gradient, out);
  return out;
}

void sparse_segment_reduce_grad_out_cuda(const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                                         int64_t output_dim0, int64_t reduction_value, Tensor out) {
  const char* op = "sparse_segment_reduce_grad";
  const Reduction reduction =
      check_sparse_segment_reduce_grad(grad, indices, segment_ids, output_dim0, reduction_value);
  const std::vector<int64_t> shape = shape_with_rows(grad, output_dim0);
  check_dense_out(op, grad, indices, segment_ids, out, shape);
  DeviceCall call(op, grad);
  call.asks("output_dim0", output_dim0);
  resize_(out, shape, {op, "output_dim0", output_dim0});
  SegmentGradient gradient = group_segment_gradient(call, grad, indices, segment_ids, output_dim0, reduction);
  write_dense_gradient(call, gradient, out);
}

std::tuple<Tensor, Tensor> sparse_segment_reduce_grad_v2_cuda(const Tensor& grad, const Tensor& indices,
                                                              const Tensor& segment_ids, int64_t dense_output_dim0,
                                                              int64_t reduction_value) {
  const Reduction reduction = check_sparse_segment_reduce_grad(grad, indices, segment_ids, dense_output_dim0,
                                                               reduction_value, "dense_output_dim0");
  DeviceCall call("sparse_segment_reduce_grad", grad);
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
  const char* op = "sparse_segment_reduce_grad";
  const Reduction reduction = check_sparse_segment_reduce_grad(grad, indices, segment_ids, dense_output_dim0,
                                                               reduction_value, "dense_output_dim0");
  check_compact_out(op, grad, indices, segment_ids, values, rows);
  DeviceCall call(op, grad);
  SegmentGradient gradient = group_segment_gradient(call, grad, indices, segment_ids, dense_output_dim0, reduction);
  const PresentRows present = present_rows(call, gradient.groups);
  resize_compact_out(op, grad, indices, segment_ids, values, rows, present.count);
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
