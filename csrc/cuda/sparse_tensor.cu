#include "../cuda.h"
#include "../sparse_tensor.h"
#include "device.cuh"

namespace tsr {
namespace {

// ---- Reshape --------------------------------------------------------------------------------------------------------

// One thread per entry.
template <int kFrom, int kTo>
__global__ void reshape_kernel(Reshape reshape, const int64_t* from, int64_t entries, int64_t* to) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    reshape.template move<kFrom, kTo>(from + i * reshape.from_rank, to + i * reshape.to_rank);
  }
}

// One thread per element.
__global__ void copy_indices_kernel(const int64_t* from, int64_t n, int64_t* to) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) to[i] = from[i];
}

Tensor sparse_reshape_cuda(const Tensor& indices, std::vector<int64_t> shape, std::vector<int64_t> new_shape) {
  check_sparse_reshape(indices, shape, new_shape);
  DeviceCall call("sparse_reshape", indices);
  const int64_t entries = indices.size(0);
  const Tensor out = call.empty({entries, static_cast<int64_t>(new_shape.size())}, ScalarType::Long);
  if (entries == 0) return out;
  const int64_t* const from = call.data<int64_t>(indices);
  int64_t* const to = static_cast<int64_t*>(out.data_ptr());
  if (shape == new_shape) {
    launch(call, one_thread_each(indices.numel()), copy_indices_kernel, from, indices.numel(), to);
    return out;
  }
  const Reshape reshape(shape, new_shape);
  const bool matrices = reshape.from_rank == 2 && reshape.to_rank == 2;
  launch(call, one_thread_each(entries), matrices ? reshape_kernel<2, 2> : reshape_kernel<0, 0>, reshape, from, entries,
         to);
  return out;
}

// ---- Rows and offsets -----------------------------------------------------------------------------------------------

// One thread per item checks its row, then every row's first item is found.
template <class I>
__global__ void row_offsets_kernel(Column<I> row_ids, int64_t items, int64_t rows, ErrorSink errors, int64_t* offsets) {
  for (int64_t i = thread_index(); i < items; i += thread_count()) {
    const int64_t id = row_ids[i];
    if (id < 0 || id >= rows) {
      errors.report(Argument::kRowIds, Fault::kOutOfRange, i, id, rows);
    } else if (i > 0 && id < row_ids[i - 1]) {
      errors.report(Argument::kRowIds, Fault::kUnsorted, i, id, row_ids[i - 1]);
    }
  }
  write_offsets(row_ids, items, rows, offsets);
}

Tensor row_ids_to_offsets_cuda(const Tensor& row_ids, int64_t num_rows) {
  check_row_ids_to_offsets(row_ids, num_rows);
  DeviceCall call("row_ids_to_offsets", row_ids);
  call.asks("num_rows", num_rows);
  const int64_t items = row_ids.size(0);
  const Tensor out = call.empty({num_rows + 1}, ScalarType::Long);
  dispatch_index(row_ids.scalar_type(), call.op(), "row_ids", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const Column<I> ids{static_cast<const I*>(row_ids.data_ptr()), row_ids.stride(0)};
    launch(call, one_thread_each(std::max(items, num_rows / kOffsetsPerThread + 1)), row_offsets_kernel<I>, ids, items,
           num_rows, call.errors(), static_cast<int64_t*>(out.data_ptr()));
  });
  return out;
}

// One thread per offset checks it, and one per item finds the last row that begins at or before it. Offsets without
// sense give rows that exist, if any do.
template <class I>
__global__ void row_ids_kernel(const I* offsets, int64_t rows, int64_t items, ErrorSink errors, int64_t* row_ids) {
  for (int64_t r = thread_index(); r <= rows; r += thread_count()) {
    const int64_t offset = offsets[r];
    if (r == 0 && offset != 0) {
      errors.report(Argument::kOffsets, Fault::kNotFirst, r, offset, 0);
    } else if (r > 0 && offset < offsets[r - 1]) {
      errors.report(Argument::kOffsets, Fault::kDecreasing, r, offset, offsets[r - 1]);
    } else if (r == rows && offset != items) {
      errors.report(Argument::kOffsets, Fault::kNotItems, r, offset, items);
    }
  }
  for (int64_t i = thread_index(); i < items; i += thread_count()) {
    const int64_t row = lower_bound(offsets, rows + 1, i + 1) - 1;
    row_ids[i] = row < 0 ? 0 : row < rows ? row : rows - 1;
  }
}

Tensor offsets_to_row_ids_cuda(const Tensor& offsets, int64_t num_items) {
  check_offsets_to_row_ids(offsets, num_items);
  DeviceCall call("offsets_to_row_ids", offsets);
  call.asks("num_items", num_items);
  const Tensor out = call.empty({num_items}, ScalarType::Long);
  const int64_t rows = offsets.size(0) - 1;
  dispatch_index(offsets.scalar_type(), call.op(), "offsets", [&](auto tag) {
    using I = typename decltype(tag)::type;
    launch(call, one_thread_each(std::max(num_items, rows + 1)), row_ids_kernel<I>, call.data<I>(offsets), rows,
           num_items, call.errors(), static_cast<int64_t*>(out.data_ptr()));
  });
  return out;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "sparse_reshape", &tsr::sparse_reshape_cuda);
  TSR_IMPL(m, "row_ids_to_offsets", &tsr::row_ids_to_offsets_cuda);
  TSR_IMPL(m, "offsets_to_row_ids", &tsr::offsets_to_row_ids_cuda);
}
