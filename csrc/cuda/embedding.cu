#include "../cuda.h"
#include "../embedding.h"
#include "bags.cuh"
#include "device.cuh"
#include "pool.cuh"

namespace tsr {
namespace {

// A team owns a tile of out[i, :] and copies it in units of Unit; a row that does not exist is zero.
template <class Unit, class I>
__global__ void embedding_kernel(const Unit* weight, int64_t rows, int64_t units, const I* indices, ErrorSink errors,
                                 RowTiling tiling, Unit* out) {
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const int64_t index = indices[tile.row];
    const bool in_range = index >= 0 && index < rows;
    if (!in_range && tile.first_lane) errors.report(Argument::kIndices, Fault::kOutOfRange, tile.row, index, rows);
    // out[i, column]
    if (tile.column < units) {
      out[tile.row * units + tile.column] = in_range ? weight[index * units + tile.column] : Unit{};
    }
  }
}

template <class Unit>
void copy_rows(DeviceCall& call, const void* weight, int64_t rows, int64_t row_bytes, const Tensor& indices,
               const Tensor& out) {
  const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
  const RowTiling tiling(indices.numel(), units, 1);
  dispatch_index(indices.scalar_type(), call.op(), "indices", [&](auto tag) {
    using I = typename decltype(tag)::type;
    launch(call, tiling.shape(), embedding_kernel<Unit, I>, static_cast<const Unit*>(weight), rows, units,
           call.data<I>(indices), call.errors(), tiling, static_cast<Unit*>(out.data_ptr()));
  });
}

Tensor embedding_cuda(const Tensor& weight, const Tensor& indices, int64_t padding_idx, bool, bool) {
  DeviceCall call("embedding", weight);
  check_embedding(weight, indices, padding_idx);
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

// A team owns a tile of out[b, :]; each lane keeps the maximum of its column and the entry that it came from.
template <class T, class I>
__global__ void max_kernel(const T* weight, int64_t columns, BagsView<I> bags, ErrorSink errors, RowTiling tiling,
                           T* out, int64_t* argmax) {
  using A = acc_t<T>;
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    A best = 0;
    int64_t winner = -1;
    for (int64_t i = bags.offsets[tile.row]; i < bags.offsets[tile.row + 1]; ++i) {
      const int64_t index = bags.indices[i];
      if (index < 0 || index >= bags.rows) {
        if (tile.first_lane) errors.report(Argument::kIndices, Fault::kOutOfRange, i, index, bags.rows);
        continue;
      }
      if (index == bags.padding_idx || tile.column >= columns) continue;
      const A value = static_cast<A>(weight[index * columns + tile.column]);
      const bool best_is_nan = best != best, is_nan = value != value;
      if (winner < 0 || (!best_is_nan && (is_nan || value > best))) {
        best = value;
        winner = i;
      }
    }
    if (tile.column >= columns) continue;
    // out[b, column]
    out[tile.row * columns + tile.column] = static_cast<T>(best);
    argmax[tile.row * columns + tile.column] = winner;
  }
}

template <class T>
Tensor max_bags(DeviceCall& call, const Tensor& weight, const Tensor& indices, const int64_t* offsets, int64_t bags,
                int64_t padding_idx, const Tensor& out) {
  const int64_t columns = weight.size(1);
  const Tensor argmax = call.empty({bags, columns}, ScalarType::Long);
  const RowTiling tiling(bags, columns, 1);
  dispatch_index(indices.scalar_type(), call.op(), "indices", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const BagsView<I> view{call.data<I>(indices), weight.size(0), padding_idx, offsets, bags};
    launch(call, tiling.shape(), max_kernel<T, I>, call.data<T>(weight), columns, view, call.errors(), tiling,
           static_cast<T*>(out.data_ptr()), static_cast<int64_t*>(argmax.data_ptr()));
  });
  return argmax;
}

std::tuple<Tensor, Tensor> embedding_bag_cuda(const Tensor& weight, const Tensor& indices, const Tensor& offsets,
                                              const std::optional<Tensor>& per_sample_weights, int64_t mode,
                                              int64_t padding_idx, bool, bool) {
  DeviceCall call("embedding_bag", weight);
  const Reduction reduction = check_embedding_bag(weight, indices, offsets, per_sample_weights, mode, padding_idx);
  const int64_t bags = offsets.size(0) - 1, columns = weight.size(1);
  const int64_t* const checked = bag_offsets(call, offsets, indices.size(0));
  const Tensor out = call.empty({bags, columns}, weight.scalar_type());
  return dispatch_float(weight.scalar_type(), call.op(), "weight", [&](auto tag) -> std::tuple<Tensor, Tensor> {
    using T = typename decltype(tag)::type;
    if (reduction == Reduction::kMax) {
      return {out, max_bags<T>(call, weight, indices, checked, bags, padding_idx, out)};
    }
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
    pooling.weights = entry_weights<T>(call, per_sample_weights);
    pooling.padding_idx = padding_idx;
    pooling.divisor = divisor_of(reduction);
    pool_rows(call, pooling);
    return {out, call.empty({0}, ScalarType::Long)};
  });
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding", &tsr::embedding_cuda);
  TSR_IMPL(m, "embedding_bag", &tsr::embedding_bag_cuda);
}
