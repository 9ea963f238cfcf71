// Lookups in tables that are split or clipped, and the clip's part of their gradients.
#include "../cuda.h"
#include "../embedding_shards.h"
#include "bags.cuh"
#include "device.cuh"
#include "pool.cuh"
#include "table_shards.cuh"

namespace tsr {
namespace {

// ---- Lookups --------------------------------------------------------------------------------------------------------

// Bags of one entry each. One thread per offset.
__global__ void single_offsets_kernel(int64_t entries, int64_t* offsets) {
  for (int64_t b = thread_index(); b <= entries; b += thread_count()) offsets[b] = b;
}

const int64_t* single_offsets(DeviceCall& call, int64_t entries) {
  int64_t* const offsets = call.workspace<int64_t>(entries + 1);
  launch(call, one_thread_each(entries + 1), single_offsets_kernel, entries, offsets);
  return offsets;
}

// factors[i] = what clips row indices[i]. A team takes an entry: its lanes share the columns.
template <int width, class T, class I>
__global__ void clip_factors_kernel(ShardedTable table, int64_t rows, int64_t columns, bool aligned, const I* indices,
                                    int64_t entries, acc_t<T> max_norm, RowTiling tiling, acc_t<T>* factors) {
  using A = acc_t<T>;
  const int lanes = 1 << tiling.lanes_log2, lane = static_cast<int>(threadIdx.x) % lanes;
  for (int64_t i = tiling.first(); i < entries; i += tiling.stride()) {
    const int64_t index = indices[i];
    A squares = 0;
    if (index >= 0 && index < rows) {
      const T* const row = table.row<T>(index, columns);
      for (int64_t c = int64_t{lane} * width; c < columns; c += int64_t{lanes} * width) {
        const Vector<T, width> x = load_columns<T, width>(row + c, aligned);
#pragma unroll
        for (int k = 0; k < width; ++k) squares += static_cast<A>(x.at[k]) * static_cast<A>(x.at[k]);
      }
    }
    squares = team_sum(tiling, squares);
    if (lane == 0) factors[i] = clip_factor(squares, max_norm, [](A sum) { return sqrt(sum); });
  }
}

// What clips the row of each entry, in the accumulator's type: [entries].
const void* clip_factors(DeviceCall& call, const Pooling& p, const ShardedTable& table, double max_norm) {
  return dispatch_float(p.dtype, call.op(), "params", [&](auto value_tag) -> const void* {
    using T = typename decltype(value_tag)::type;
    constexpr int wide = 16 / sizeof(T);
    acc_t<T>* const factors = call.workspace<acc_t<T>>(p.entries);
    const bool aligned = vector_width<T>(p.columns, {table.alignment}) == wide;
    dispatch_index(p.index_dtype, call.op(), "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const auto start = [&](auto width) {
        const RowTiling tiling(p.entries, std::min<int64_t>(p.columns, kWarp * width.value), width.value);
        launch(call, tiling.shape(), clip_factors_kernel<width.value, T, I>, table, p.rows, p.columns, aligned,
               static_cast<const I*>(p.indices), p.entries, static_cast<acc_t<T>>(max_norm), tiling, factors);
      };
      if (p.columns % wide == 0) {
        start(std::integral_constant<int, wide>());
      } else {
        start(std::integral_constant<int, 1>());
      }
    });
    return factors;
  });
}

Tensor embedding_bag_shards_cuda(const std::vector<Tensor>& params, const Tensor& indices,
                                 const std::optional<Tensor>& offsets, const std::optional<Tensor>& per_sample_weights,
                                 int64_t mode, int64_t padding_idx, double max_norm, bool) {
  const auto [reduction, rows] =
      check_embedding_bag_shards(params, indices, offsets, per_sample_weights, mode, padding_idx, max_norm);
  DeviceCall call("embedding_bag_shards", params[0]);
  const int64_t entries = indices.size(0), bags = offsets ? offsets->size(0) - 1 : entries;
  Pooling pooling;
  pooling.dtype = params[0].scalar_type();
  pooling.rows = rows;
  pooling.columns = params[0].size(1);
  pooling.index_dtype = indices.scalar_type();
  pooling.indices = call.data(indices);
  pooling.entries = entries;
  pooling.offsets = offsets ? bag_offsets(call, *offsets, entries) : single_offsets(call, entries);
  pooling.bags = bags;
  pooling.padding_idx = padding_idx;
  pooling.divisor = divisor_of(reduction);
  if (per_sample_weights) pooling.weights = call.data(*per_sample_weights);
  const Tensor out = call.empty({bags, pooling.columns}, pooling.dtype);
  pooling.out = out.data_ptr();
  if (params.size() == 1 && max_norm < 0) {
    pooling.table = call.data(params[0]);
    pool_rows(call, pooling);
    return out;
  }
  const ShardedTable table = upload_table(call, params);
  if (max_norm >= 0) pooling.coefficients = clip_factors(call, pooling, table, max_norm);
  pool_sharded_rows(call, pooling, table);
  return out;
}

// ---- Gradients of clipped rows --------------------------------------------------------------------------------------

// A team owns out[u]: it reads the row and its gradient twice, the second time from the cache.
template <class T>
__global__ void clip_rows_backward_kernel(const acc_t<T>* grad, ShardedTable table, int64_t table_rows,
                                          const int64_t* wanted, int64_t count, int64_t columns, acc_t<T> max_norm,
                                          ErrorSink errors, RowTiling tiling, T* out) {
  using A = acc_t<T>;
  const int lanes = 1 << tiling.lanes_log2, lane = static_cast<int>(threadIdx.x) % lanes;
  for (int64_t u = tiling.first(); u < count; u += tiling.stride()) {
    const int64_t r = wanted == nullptr ? u : wanted[u];
    const bool in_range = r >= 0 && r < table_rows;
    if (!in_range && lane == 0) errors.report(Argument::kRows, Fault::kOutOfRange, u, r, table_rows);
    const T* const x = in_range ? table.row<T>(r, columns) : nullptr;
    const A* const g = grad + u * columns;
    A squares = 0, along = 0, others = 0;
    for (int64_t c = lane; in_range && c < columns; c += lanes) {
      squares += static_cast<A>(x[c]) * static_cast<A>(x[c]);
      along += static_cast<A>(x[c]) * g[c];
      if (g[c] != A(0)) others = A(1);
    }
    squares = team_sum(tiling, squares);
    along = team_sum(tiling, along) / squares;
    const bool is_zero = team_sum(tiling, others) == A(0);
    const A norm = sqrt(squares), factor = max_norm / norm;
    for (int64_t c = lane; c < columns; c += lanes) {
      A value = 0;
      if (!is_zero) value = norm < max_norm ? g[c] : factor * (g[c] - static_cast<A>(x[c]) * along);
      out[u * columns + c] = static_cast<T>(value);
    }
  }
}

Tensor clip_rows_backward_cuda(const Tensor& grad, const std::vector<Tensor>& params, const std::optional<Tensor>& rows,
                               double max_norm) {
  const int64_t table_rows = check_clip_rows_backward(grad, params, rows, max_norm);
  DeviceCall call("clip_rows_backward", params[0]);
  const int64_t count = grad.size(0), columns = grad.size(1);
  const Tensor out = call.empty({count, columns}, params[0].scalar_type());
  const ShardedTable table = upload_table(call, params);
  const int64_t* const wanted = rows ? call.data<int64_t>(*rows) : nullptr;
  const RowTiling tiling(count, std::min<int64_t>(columns, kWarp), 1);
  dispatch_float(out.scalar_type(), call.op(), "params", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(call, tiling.shape(), clip_rows_backward_kernel<T>, call.data<acc_t<T>>(grad), table, table_rows, wanted,
           count, columns, static_cast<acc_t<T>>(max_norm), call.errors(), tiling, static_cast<T*>(out.data_ptr()));
  });
  return out;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding_bag_shards", &tsr::embedding_bag_shards_cuda);
  TSR_IMPL(m, "clip_rows_backward", &tsr::clip_rows_backward_cuda);
}
