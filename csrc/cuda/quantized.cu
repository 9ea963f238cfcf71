#include "../cuda.h"
#include "../quantized.h"
#include "bags.cuh"
#include "device.cuh"
#include "pool_extremes.cuh"
#include "pool_weighted.cuh"

namespace tsr {
namespace {

// ---- Decoding -------------------------------------------------------------------------------------------------------

// The T at x, which may be any address unless it is said to be aligned.
template <class T, bool aligned>
__device__ T read_at(const uint8_t* x) {
  if constexpr (aligned) return *reinterpret_cast<const T*>(x);
  T value;
  memcpy(&value, x, sizeof(value));
  return value;
}

// `width` neighbouring numbers of a row, from `column` on: of more than one, the row is aligned.
template <class F, int width>
__device__ Vector<float, width> decoded(const void* table, int64_t index, int64_t columns, int64_t column) {
  const uint8_t* const row = static_cast<const uint8_t*>(table) + index * bytes_of_row<F>(columns);
  Vector<float, width> x;
  if constexpr (!kIsScaled<F>) {
    const Vector<F, width> numbers = load_vector<F, width>(reinterpret_cast<const F*>(row) + column);
#pragma unroll
    for (int c = 0; c < width; ++c) x.at[c] = static_cast<float>(numbers.at[c]);
  } else {
    const uint8_t* const end = row + bytes_of_numbers<F>(columns);
    float scale, bias;
    if constexpr (std::is_same_v<F, Int8>) {
      const Vector<uint8_t, width> numbers = load_vector<uint8_t, width>(row + column);
#pragma unroll
      for (int c = 0; c < width; ++c) x.at[c] = static_cast<float>(numbers.at[c]);
      scale = read_at<float, (width > 1)>(end);
      bias = read_at<float, (width > 1)>(end + 4);
    } else {
      constexpr int bytes = (width + 1) / 2;
      const Vector<uint8_t, bytes> numbers = load_vector<uint8_t, bytes>(row + column / 2);
#pragma unroll
      for (int c = 0; c < width; ++c) {
        const int shift = width == 1 ? static_cast<int>(column % 2) * 4 : c % 2 * 4;
        x.at[c] = static_cast<float>(numbers.at[c / 2] >> shift & 15);
      }
      scale = static_cast<float>(read_at<Half, (width > 1)>(end));
      bias = static_cast<float>(read_at<Half, (width > 1)>(end + 2));
    }
    // Rounded twice, as on the CPU: the compiler does not make one operation of these.
#pragma unroll
    for (int c = 0; c < width; ++c) x.at[c] = __fadd_rn(__fmul_rn(x.at[c], scale), bias);
  }
  return x;
}

// Calls f with the columns that a lane decodes.
template <class F>
void dispatch_width(int64_t columns, const Tensor& out, const void* table, const F& f) {
  if (vector_width<float>(columns, {out.data_ptr(), table}) == 4) {
    f(std::integral_constant<int, 4>());
  } else {
    f(std::integral_constant<int, 1>());
  }
}

// ---- One row per id -------------------------------------------------------------------------------------------------

// A team owns a row of out; one that does not exist is zero.
template <class F, int width, class I>
__global__ void quantized_embedding_kernel(const void* table, int64_t rows, int64_t columns, const I* indices,
                                           ErrorSink errors, RowTiling tiling, float* out) {
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const int64_t index = indices[tile.row];
    const bool in_range = index >= 0 && index < rows;
    if (!in_range && tile.first_lane) errors.report(Argument::kIndices, Fault::kOutOfRange, tile.row, index, rows);
    if (tile.column >= columns) continue;
    Vector<float, width> row{};
    if (in_range) row = decoded<F, width>(table, index, columns, tile.column);
    store_vector(out + tile.row * columns + tile.column, row);
  }
}

Tensor quantized_embedding_cuda(const Tensor& weight, const Tensor& indices, int64_t bits) {
  const int64_t columns = check_quantized_embedding(weight, indices, bits);
  DeviceCall call("quantized_embedding", weight);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < indices.dim(); ++d) shape.push_back(indices.size(d));
  shape.push_back(columns);
  const Tensor out = call.empty(shape, ScalarType::Float);
  const void* const table = call.data(weight);
  dispatch_rows(weight, bits, [&](auto format) {
    using F = typename decltype(format)::type;
    dispatch_index(indices.scalar_type(), call.op(), "indices", [&](auto tag) {
      using I = typename decltype(tag)::type;
      dispatch_width(columns, out, table, [&](auto width) {
        const RowTiling tiling(indices.numel(), columns, width.value);
        launch(call, tiling.shape(), quantized_embedding_kernel<F, width.value, I>, table, weight.size(0), columns,
               call.data<I>(indices), call.errors(), tiling, static_cast<float*>(out.data_ptr()));
      });
    });
  });
  return out;
}

// ---- Bags -----------------------------------------------------------------------------------------------------------

// A Total of float32 rows (pool_kernels.cuh) whose rows are decoded: the view's table is bytes.
template <class F, class Total>
struct Decoded : Total {
  struct Entry : Total::Entry {
    template <class View>
    __device__ void load(const View& p, const RowTile& tile, bool has_columns, int64_t index, int64_t j) {
      Total::Entry::load(p, tile, false, index, j);
      if (has_columns) this->row = decoded<F, Total::width>(p.table, index, p.columns, tile.column);
    }
  };
};

// Of an extreme nobody wants to know where it comes from.
template <int width>
struct ExtremeAlone : Extreme<float, width> {
  template <class View>
  __device__ void store(const View& p, int64_t bag, const RowTile& tile) const {
    if (tile.column < p.columns) p.store_row(bag, tile, this->result(p));
  }
};

Tensor quantized_embedding_bag_cuda(const Tensor& weight, const Tensor& indices, const Tensor& offsets,
                                    const std::optional<Tensor>& per_sample_weights, int64_t bits, int64_t mode,
                                    int64_t padding_idx, bool include_last_offset, int64_t first_bag,
                                    std::optional<int64_t> bags) {
  const ChosenBags chosen = check_quantized_embedding_bag(weight, indices, offsets, per_sample_weights, bits, mode,
                                                          padding_idx, include_last_offset, first_bag, bags);
  DeviceCall call("quantized_embedding_bag", weight);
  const Tensor out = call.empty({chosen.count, chosen.dim}, ScalarType::Float);
  Pooling pooling;
  pooling.dtype = ScalarType::Float;
  pooling.table = call.data(weight);
  pooling.rows = weight.size(0);
  pooling.columns = chosen.dim;
  pooling.index_dtype = indices.scalar_type();
  pooling.indices = call.data(indices);
  pooling.entries = indices.size(0);
  pooling.offsets = bag_offsets(call, offsets, pooling.entries, chosen.first, chosen.count, include_last_offset);
  pooling.bags = chosen.count;
  pooling.out = out.data_ptr();
  pooling.padding_idx = padding_idx;
  if (per_sample_weights) pooling.weights = call.data(*per_sample_weights);
  pooling.divisor = divisor_of(chosen.reduction);
  dispatch_rows(weight, bits, [&](auto format) {
    using F = typename decltype(format)::type;
    dispatch_index(pooling.index_dtype, call.op(), "indices", [&](auto tag) {
      using I = typename decltype(tag)::type;
      dispatch_width(pooling.columns, out, pooling.table, [&](auto width) {
        constexpr int w = width.value;
        PoolView<float, I> view = view_of<float, I>(call, pooling);
        view.reduction = chosen.reduction;
        if (is_extreme(chosen.reduction)) {
          launch_pool<Decoded<F, ExtremeAlone<w>>, ExtremeAlone<w>>(call, view, pooling.entries);
        } else if (per_sample_weights) {
          launch_pool<Decoded<F, WeightedSum<float, w>>, WeightedSum<float, w>>(call, view, pooling.entries);
        } else {
          launch_pool<Decoded<F, Sum<float, w>>, Sum<float, w>>(call, view, pooling.entries);
        }
      });
    });
  });
  return out;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "quantized_embedding", &tsr::quantized_embedding_cuda);
  TSR_IMPL(m, "quantized_embedding_bag", &tsr::quantized_embedding_bag_cuda);
}
