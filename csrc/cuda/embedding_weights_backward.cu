// Gradients with respect to per_sample_weights.
#include "../cuda.h"
#include "../embedding_shards.h"
#include "bags.cuh"
#include "device.cuh"
#include "embedding_bags.cuh"
#include "table_shards.cuh"
#include "weight_products.cuh"

namespace tsr {
namespace {

// Where the rows x_i are, and whether they are clipped as they are read.
template <class T>
struct PlainRows {
  static constexpr bool kClips = false;
  const T* table;
  acc_t<T> max_norm;

  __device__ const T* row(int64_t index, int64_t columns) const { return table + index * columns; }
};

template <class T, bool clips>
struct ShardRows {
  static constexpr bool kClips = clips;
  ShardedTable table;
  acc_t<T> max_norm;

  __device__ const T* row(int64_t index, int64_t columns) const { return table.row<T>(index, columns); }
};

template <class T>
struct WeightsBackward {
  const T* grad;    // [B, D]
  const T* output;  // [B, D]
  int64_t rows;     // V
  int64_t columns;  // D
  int64_t padding_idx;
  const int64_t* bags;       // [N]: the bag of each entry
  const T* weights;          // [N]
  const acc_t<T>* divisors;  // [B]; null for sum
  Reduction reduction;
  bool aligned;  // whether rows can be read 16 bytes at once
};

// A team owns out[i]: its lanes share the columns, and add up in a fixed tree.
template <int width, class T, class Rows>
__global__ void weights_backward_kernel(WeightsBackward<T> w, Rows rows, Integers indices, int64_t entries,
                                        ErrorSink errors, RowTiling tiling, T* out) {
  using A = acc_t<T>;
  const int lanes = 1 << tiling.lanes_log2, lane = static_cast<int>(threadIdx.x) % lanes;
  for (int64_t i = tiling.first(); i < entries; i += tiling.stride()) {
    const int64_t index = indices[i], bag = w.bags[i];
    const A weight = static_cast<A>(w.weights[i]);
    const bool in_range = index >= 0 && index < w.rows;
    const bool used = in_range && index != w.padding_idx && bag >= 0;
    Products<A> products;
    if (used) {
      const T* const x = rows.row(index, w.columns);
      const T* const output = w.divisors == nullptr ? nullptr : w.output + bag * w.columns;
      products =
          lane_products<width, Rows::kClips>(w.grad + bag * w.columns, output, w.columns, w.aligned, lane, lanes,
                                             [&](int64_t c) { return load_columns<T, width>(x + c, w.aligned); });
    }
    products.with_row = team_sum(tiling, products.with_row);
    products.with_output = team_sum(tiling, products.with_output);
    if constexpr (Rows::kClips) products.squares = team_sum(tiling, products.squares);
    if (lane != 0) continue;
    const bool is_left_out = index == w.rows && w.padding_idx == w.rows;
    if (!in_range && !is_left_out) errors.report(Argument::kIndices, Fault::kOutOfRange, i, index, w.rows);
    if (weight != weight) errors.report(Argument::kWeights, Fault::kNotANumber, i, 0, 0);
    A result = products.with_row;
    if constexpr (Rows::kClips) {
      if (used) result *= clip_factor(products.squares, rows.max_norm, [](A squares) { return sqrt(squares); });
    }
    if (used && w.divisors != nullptr) {
      result = divided_weight_gradient(w.reduction, result, products.with_output, weight, w.divisors[bag]);
    }
    out[i] = static_cast<T>(result);
  }
}

template <int width, class T, class Rows>
void launch_weights_backward(DeviceCall& call, const WeightsBackward<T>& w, const Rows& rows, const Integers& indices,
                             const Tensor& out) {
  const int64_t entries = out.size(0);
  // One tile per entry: a team's lanes take every column.
  const RowTiling tiling(entries, std::min<int64_t>(w.columns, kWarp * width), width);
  launch(call, tiling.shape(), weights_backward_kernel<width, T, Rows>, w, rows, indices, entries, call.errors(),
         tiling, static_cast<T*>(out.data_ptr()));
}

struct Inputs {
  const Tensor& grad;
  ScalarType dtype;   // of the table
  int64_t rows;       // of the table
  const void* table;  // as aligned as the table's rows
  const Tensor& indices;
  const Tensor& offsets;
  const Tensor& per_sample_weights;
  const Tensor& output;
  Reduction reduction;
  int64_t padding_idx;
};

// with_rows(tag, f) calls f with the Rows of the element type.
template <class F>
Tensor weights_gradient(DeviceCall& call, const Inputs& in, const F& with_rows) {
  const Indices ids{in.indices.scalar_type(), call.data(in.indices), in.indices.size(0), in.rows, in.padding_idx};
  const BagOf bag_of{bag_offsets(call, in.offsets, ids.entries), in.offsets.size(0) - 1};
  const int64_t* const bags = entry_bags(call, bag_of, ids.entries);
  const void* divisors = nullptr;
  if (is_divided(in.reduction)) {
    divisors = bag_divisors(call, in.dtype, ids, bag_of, in.per_sample_weights, in.reduction);
  }
  const Tensor out = call.empty({ids.entries}, in.dtype);
  dispatch_float(in.dtype, call.op(), "weight", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    constexpr int wide = 16 / sizeof(T);
    const T *const grads = call.data<T>(in.grad), *const outputs = call.data<T>(in.output);
    const int64_t columns = in.grad.size(1);
    const WeightsBackward<T> w{grads,
                               outputs,
                               ids.rows,
                               columns,
                               in.padding_idx,
                               bags,
                               call.data<T>(in.per_sample_weights),
                               static_cast<const acc_t<T>*>(divisors),
                               in.reduction,
                               vector_width<T>(columns, {grads, in.table, outputs}) == wide};
    const Integers indices{ids.data, ids.dtype == ScalarType::Long};
    with_rows(value_tag, [&](const auto& rows) {
      if (columns % wide == 0) {
        launch_weights_backward<wide>(call, w, rows, indices, out);
      } else {
        launch_weights_backward<1>(call, w, rows, indices, out);
      }
    });
  });
  return out;
}

Tensor embedding_weights_backward_cuda(const Tensor& grad, const Tensor& weight, const Tensor& indices,
                                       const Tensor& offsets, const Tensor& per_sample_weights, const Tensor& output,
                                       int64_t mode, int64_t padding_idx) {
  const Reduction reduction =
      check_embedding_weights_backward(grad, weight, indices, offsets, per_sample_weights, output, mode, padding_idx);
  DeviceCall call("embedding_weights_backward", weight);
  const void* const table = call.data(weight);
  const Inputs in{grad,    weight.scalar_type(), weight.size(0), table,     indices,
                  offsets, per_sample_weights,   output,         reduction, padding_idx};
  return weights_gradient(call, in, [&](auto tag, const auto& f) {
    using T = typename decltype(tag)::type;
    f(PlainRows<T>{static_cast<const T*>(table), 0});
  });
}

Tensor embedding_bag_shards_weights_backward_cuda(const Tensor& grad, const std::vector<Tensor>& params,
                                                  const Tensor& indices, const Tensor& offsets,
                                                  const Tensor& per_sample_weights, const Tensor& output, int64_t mode,
                                                  int64_t padding_idx, double max_norm) {
  const auto [reduction, rows] = check_embedding_bag_shards_weights_backward(
      grad, params, indices, offsets, per_sample_weights, output, mode, padding_idx, max_norm);
  DeviceCall call("embedding_bag_shards_weights_backward", params[0]);
  const ShardedTable table = upload_table(call, params);
  const Inputs in{grad,    params[0].scalar_type(), rows,   table.alignment, indices,
                  offsets, per_sample_weights,      output, reduction,       padding_idx};
  return weights_gradient(call, in, [&](auto tag, const auto& f) {
    using T = typename decltype(tag)::type;
    const auto limit = static_cast<acc_t<T>>(max_norm);
    if (max_norm >= 0) {
      f(ShardRows<T, true>{table, limit});
    } else {
      f(ShardRows<T, false>{table, limit});
    }
  });
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding_weights_backward", &tsr::embedding_weights_backward_cuda);
  TSR_IMPL(m, "embedding_bag_shards_weights_backward", &tsr::embedding_bag_shards_weights_backward_cuda);
}
