#include "../cuda.h"
#include "../embedding.h"
#include "bags.cuh"
#include "device.cuh"
#include "pool.cuh"

namespace tsr {
namespace {

// Rows that a team loads before it stores the first: enough reads in flight to hide the memory's latency.
constexpr int kRowsInFlight = 4;

// A team owns a tile of kRowsInFlight neighbouring rows of out and copies them in units of Unit; a row that does not
// exist is zero.
template <class Unit, class I>
__global__ void embedding_kernel(const Unit* weight, int64_t rows, int64_t units, const I* indices, int64_t entries,
                                 ErrorSink errors, RowTiling tiling, Unit* out) {
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const int64_t first = tile.row * kRowsInFlight;
    int64_t index[kRowsInFlight];
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k)
      index[k] = first + k < entries ? static_cast<int64_t>(indices[first + k]) : 0;
    bool any_bad = false;
    Unit row[kRowsInFlight];
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      const bool in_range = static_cast<uint64_t>(index[k]) < static_cast<uint64_t>(rows);
      any_bad = any_bad || !in_range;
      // weight[index, column]
      row[k] = in_range && tile.column < units ? weight[index[k] * units + tile.column] : Unit{};
    }
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      // out[i, column]
      if (first + k < entries && tile.column < units) out[(first + k) * units + tile.column] = row[k];
    }
    if (!any_bad || !tile.first_lane) continue;
#pragma unroll 1
    for (int64_t i = first; i < first + kRowsInFlight && i < entries; ++i) {
      const int64_t bad = indices[i];
      if (bad < 0 || bad >= rows) errors.report(Argument::kIndices, Fault::kOutOfRange, i, bad, rows);
    }
  }
}

template <class Unit>
void copy_rows(DeviceCall& call, const void* weight, int64_t rows, int64_t row_bytes, const Tensor& indices,
               const Tensor& out) {
  const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t entries = indices.numel();
  const RowTiling tiling((entries + kRowsInFlight - 1) / kRowsInFlight, units, 1);
  dispatch_index(indices.scalar_type(), call.op(), "indices", [&](auto tag) {
    using I = typename decltype(tag)::type;
    launch(call, tiling.shape(), embedding_kernel<Unit, I>, static_cast<const Unit*>(weight), rows, units,
           call.data<I>(indices), entries, call.errors(), tiling, static_cast<Unit*>(out.data_ptr()));
  });
}

Tensor embedding_cuda(const Tensor& weight, const Tensor& indices, int64_t padding_idx, bool, bool) {
  check_embedding(weight, indices, padding_idx);
  DeviceCall call("embedding", weight);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < indices.dim(); ++d) shape.push_back(indices.size(d));
  shape.push_back(weight.size(1));
  const Tensor out = call.empty(shape, weight.scalar_type());
  const void* const table = call.data(weight);
  const int64_t rows = weight.size(0), row_bytes = weight.size(1) * static_cast<int64_t>(weight.element_size());
  if (vector_width<uint8_t>(row_bytes, {table, out.data_ptr()}) == 16) {
    copy_rows<Vector<uint32_t, 4>>(call, table, rows, row_bytes, indices, out);
  } else if (weight.element_size() == 8) {
    copy_rows<uint64_t>(call, table, rows, row_bytes, indices, out);
  } else if (weight.element_size() == 4) {
    copy_rows<uint32_t>(call, table, rows, row_bytes, indices, out);
  } else {
    copy_rows<uint16_t>(call, table, rows, row_bytes, indices, out);
  }
  return out;
}

std::tuple<Tensor, Tensor> embedding_bag_cuda(const Tensor& weight, const Tensor& indices, const Tensor& offsets,
                                              const std::optional<Tensor>& per_sample_weights, int64_t mode,
                                              int64_t padding_idx, bool, bool, bool include_last_offset) {
  const Reduction reduction =
      check_embedding_bag(weight, indices, offsets, per_sample_weights, mode, padding_idx, include_last_offset);
  DeviceCall call("embedding_bag", weight);
  const int64_t bags = bag_count(offsets, include_last_offset), columns = weight.size(1);
  const int64_t* const checked = bag_offsets(call, offsets, indices.size(0), include_last_offset);
  const Tensor out = call.empty({bags, columns}, weight.scalar_type());
  Pooling pooling;
  pooling.dtype = weight.scalar_type();
  pooling.table = call.data(weight);
  pooling.rows = weight.size(0);
  pooling.columns = columns;
  pooling.index_dtype = indices.scalar_type();
  pooling.indices = call.data(indices);
  pooling.entries = indices.size(0);
  pooling.offsets = checked;
  pooling.bags = bags;
  pooling.out = out.data_ptr();
  pooling.padding_idx = padding_idx;
  if (is_extreme(reduction)) {
    const Tensor argmax = call.empty({bags, columns}, ScalarType::Long);
    pool_extremes(call, pooling, reduction, static_cast<int64_t*>(argmax.data_ptr()));
    return {out, argmax};
  }
  if (per_sample_weights) pooling.weights = call.data(*per_sample_weights);
  pooling.divisor = divisor_of(reduction);
  pool_rows(call, pooling);
  return {out, call.empty({0}, ScalarType::Long)};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding", &tsr::embedding_cuda);
  TSR_IMPL(m, "embedding_bag", &tsr::embedding_bag_cuda);
}
