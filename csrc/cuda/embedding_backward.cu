#include "../cuda.h"
#include "../embedding.h"
#include "bags.cuh"
#include "device.cuh"
#include "pool.cuh"
#include "row_groups.cuh"

namespace tsr {
namespace {

// ---- Gradient with respect to weight --------------------------------------------------------------------------------

// The gradient's entries grouped by row, ready to be added up over any set of rows.
struct WeightGradient {
  RowGroups groups;
  Pooling pooling;  // all but the rows it writes
  // Mode max: the positions that won, [bags, columns], and the position of each sorted entry.
  const int64_t* winners = nullptr;
  const int64_t* positions = nullptr;
};

struct BackwardInputs {
  const Tensor& grad;
  const Tensor& indices;
  const std::optional<Tensor>& offsets;
  const std::optional<Tensor>& per_sample_weights;
  const std::optional<Tensor>& argmax;
  int64_t num_embeddings;
  Reduction reduction;
  int64_t padding_idx;
};

// 1 / divisor of each bag in mode mean or sqrtn.
const void* bag_reciprocals(DeviceCall& call, ScalarType dtype, const Indices& indices, const BagOf& bags,
                            const std::optional<Tensor>& per_sample_weights, Reduction reduction) {
  Pooling pooling;
  pooling.dtype = dtype;
  pooling.rows = indices.rows;
  pooling.index_dtype = indices.dtype;
  pooling.indices = indices.data;
  pooling.entries = indices.entries;
  pooling.offsets = bags.offsets;
  pooling.bags = bags.bags;
  if (per_sample_weights) pooling.weights = call.data(*per_sample_weights);
  pooling.padding_idx = indices.padding_idx;
  pooling.divisor = divisor_of(reduction);
  return pool_reciprocals(call, pooling);
}

// One thread per sorted entry looks up its bag, and its weight and position where they are asked for.
template <class T, class K>
__global__ void sorted_entries_kernel(K* sorted, int64_t entries, const int64_t* bags, const T* weights,
                                      ErrorSink errors, T* sorted_weights, int64_t* positions) {
  for (int64_t j = thread_index(); j < entries; j += thread_count()) {
    const int64_t i = static_cast<int64_t>(sorted[j]);
    sorted[j] = static_cast<K>(bags[i]);
    if (positions != nullptr) positions[j] = i;
    if (weights == nullptr) continue;
    sorted_weights[j] = weights[i];
    const acc_t<T> weight = static_cast<acc_t<T>>(weights[i]);
    if (weight != weight) errors.report(Argument::kWeights, Fault::kNotANumber, i, 0, 0);
  }
}

// Groups entries that do not only need their bag: puts bags in the place of sorted positions.
void group_weighted_or_won(DeviceCall& call, const BackwardInputs& in, const Indices& indices, const BagOf& bag_of,
                           WeightGradient& gradient) {
  gradient.groups = group_by_row(call, indices, std::max(indices.entries, bag_of.bags), EntryItself());
  const int64_t* const bags = entry_bags(call, bag_of, indices.entries);
  if (in.reduction == Reduction::kMax) {
    gradient.winners = call.data<int64_t>(*in.argmax);
    gradient.positions = call.workspace<int64_t>(indices.entries);
  }
  dispatch_float(in.grad.scalar_type(), call.op(), "grad", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const weights = in.per_sample_weights ? call.data<T>(*in.per_sample_weights) : nullptr;
    T* const sorted_weights = in.per_sample_weights ? call.workspace<T>(indices.entries) : nullptr;
    gradient.pooling.weights = sorted_weights;
    with_pairs(gradient.groups, [&](const auto& pairs) {
      using K = std::remove_pointer_t<decltype(pairs.values)>;
      launch(call, one_thread_each(indices.entries), sorted_entries_kernel<T, K>, pairs.values, indices.entries, bags,
             weights, call.errors(), sorted_weights, const_cast<int64_t*>(gradient.positions));
    });
  });
}

WeightGradient group_weight_gradient(DeviceCall& call, const BackwardInputs& in, bool scale_grad_by_freq) {
  const Indices indices{in.indices.scalar_type(), call.data(in.indices), in.indices.size(0), in.num_embeddings,
                        in.padding_idx};
  WeightGradient gradient;
  Pooling& pooling = gradient.pooling;
  if (!in.offsets) {
    gradient.groups = group_by_row(call, indices, indices.entries, EntryItself());
  } else {
    const BagOf bags{bag_offsets(call, *in.offsets, indices.entries), in.grad.size(0)};
    if (in.reduction == Reduction::kMean || in.reduction == Reduction::kSqrtN) {
      pooling.scales = bag_reciprocals(call, in.grad.scalar_type(), indices, bags, in.per_sample_weights, in.reduction);
    }
    if (in.per_sample_weights || in.reduction == Reduction::kMax) {
      group_weighted_or_won(call, in, indices, bags, gradient);
    } else {
      gradient.groups = group_by_row(call, indices, bags.bags, bags);
    }
  }
  pooling.dtype = in.grad.scalar_type();
  pooling.table = call.data(in.grad);
  pooling.rows = in.grad.size(0);
  pooling.columns = in.grad.size(1);
  pooling.index_dtype = gradient.groups.source_dtype();
  pooling.indices = gradient.groups.sources();
  pooling.entries = indices.entries;
  pooling.divisor = scale_grad_by_freq ? Divisor::kCount : Divisor::kOne;
  pooling.report = false;  // sources are our own
  return gradient;
}

// Adds up the rows whose sorted entries `offsets` delimits: the rows of out.
void write_weight_gradient(DeviceCall& call, const WeightGradient& gradient, const int64_t* offsets,
                           const Tensor& out) {
  Pooling pooling = gradient.pooling;
  pooling.offsets = offsets;
  pooling.bags = out.size(0);
  pooling.out = out.data_ptr();
  if (gradient.winners != nullptr) {
    pool_won_rows(call, pooling, gradient.winners, gradient.positions);
  } else {
    pool_rows(call, pooling);
  }
}

Tensor embedding_dense_backward_cuda(const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
                                     const std::optional<Tensor>& per_sample_weights,
                                     const std::optional<Tensor>& argmax, int64_t num_embeddings, int64_t mode,
                                     int64_t padding_idx, bool scale_grad_by_freq) {
  DeviceCall call("embedding_backward", grad);
  const Reduction reduction =
      check_embedding_backward(grad, indices, offsets, per_sample_weights, argmax, num_embeddings, mode, padding_idx);
  const BackwardInputs in{grad, indices, offsets, per_sample_weights, argmax, num_embeddings, reduction, padding_idx};
  const Tensor out = call.empty({num_embeddings, grad.size(1)}, grad.scalar_type());
  const WeightGradient gradient = group_weight_gradient(call, in, scale_grad_by_freq);
  write_weight_gradient(call, gradient, dense_offsets(call, gradient.groups), out);
  return out;
}

std::tuple<Tensor, Tensor> embedding_sparse_backward_cuda(const Tensor& grad, const Tensor& indices,
                                                          const std::optional<Tensor>& offsets,
                                                          const std::optional<Tensor>& per_sample_weights,
                                                          const std::optional<Tensor>& argmax, int64_t num_embeddings,
                                                          int64_t mode, int64_t padding_idx, bool scale_grad_by_freq) {
  DeviceCall call("embedding_backward", grad);
  const Reduction reduction =
      check_embedding_backward(grad, indices, offsets, per_sample_weights, argmax, num_embeddings, mode, padding_idx);
  const BackwardInputs in{grad, indices, offsets, per_sample_weights, argmax, num_embeddings, reduction, padding_idx};
  const WeightGradient gradient = group_weight_gradient(call, in, scale_grad_by_freq);
  const PresentRows present = present_rows(call, gradient.groups);
  const Tensor values = call.empty({present.count, grad.size(1)}, grad.scalar_type());
  const Tensor rows = call.empty({present.count}, ScalarType::Long);
  write_row_ids(call, gradient.groups, present, rows);
  write_weight_gradient(call, gradient, present.offsets, values);
  return {values, rows};
}

// ---- Gradient with respect to per_sample_weights --------------------------------------------------------------------

template <class T>
struct WeightsBackward {
  const T* grad;    // [B, D]
  const T* weight;  // [V, D]
  const T* output;  // [B, D]
  int64_t rows;     // V
  int64_t columns;  // D
  int64_t padding_idx;
  const int64_t* bags;          // [N]: the bag of each entry
  const T* weights;             // [N]
  const acc_t<T>* reciprocals;  // [B]: 1 / divisor; null for sum
  Reduction reduction;
  bool aligned;  // whether rows can be read 16 bytes at once
};

// `width` neighbouring columns. Which of them a lane adds up must not depend on the address: the same bits everywhere.
template <class T, int width>
__device__ Vector<T, width> load_columns(const T* from, bool aligned) {
  if (aligned) return load_vector<T, width>(from);
  Vector<T, width> columns;
#pragma unroll
  for (int c = 0; c < width; ++c) columns.at[c] = from[c];
  return columns;
}

// <grad[b], x> and, where there are divisors, <grad[b], output[b]>.
template <class A>
struct Products {
  A with_row = 0;
  A with_output = 0;
};

// What the lane's own columns add to the products.
template <class T, int width>
__device__ Products<acc_t<T>> lane_products(const WeightsBackward<T>& w, int64_t bag, int64_t index, int lane,
                                            int lanes) {
  using A = acc_t<T>;
  Products<A> products;
  for (int64_t c = int64_t{lane} * width; c < w.columns; c += int64_t{lanes} * width) {
    const Vector<T, width> grad = load_columns<T, width>(w.grad + bag * w.columns + c, w.aligned);
    const Vector<T, width> row = load_columns<T, width>(w.weight + index * w.columns + c, w.aligned);
    Vector<T, width> output{};
    if (w.reciprocals != nullptr) output = load_columns<T, width>(w.output + bag * w.columns + c, w.aligned);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      products.with_row += static_cast<A>(grad.at[k]) * static_cast<A>(row.at[k]);
      products.with_output += static_cast<A>(grad.at[k]) * static_cast<A>(output.at[k]);
    }
  }
  return products;
}

// A team owns out[i]: its lanes share the columns, and add up in a fixed tree.
template <class T, class I, int width>
__global__ void weights_backward_kernel(WeightsBackward<T> w, const I* indices, int64_t entries, ErrorSink errors,
                                        RowTiling tiling, T* out) {
  using A = acc_t<T>;
  const int lanes = 1 << tiling.lanes_log2, lane = static_cast<int>(threadIdx.x) % lanes;
  for (int64_t i = tiling.first(); i < entries; i += tiling.stride()) {
    const int64_t index = indices[i], bag = w.bags[i];
    const A weight = static_cast<A>(w.weights[i]);
    const bool in_range = index >= 0 && index < w.rows;
    const bool used = in_range && index != w.padding_idx && bag >= 0;
    Products<A> products;
    if (used) products = lane_products<T, width>(w, bag, index, lane, lanes);
    for (int step = lanes / 2; step > 0; step /= 2) {
      products.with_row += __shfl_xor_sync(tiling.team_mask(), products.with_row, step);
      products.with_output += __shfl_xor_sync(tiling.team_mask(), products.with_output, step);
    }
    if (lane != 0) continue;
    if (!in_range) errors.report(Argument::kIndices, Fault::kOutOfRange, i, index, w.rows);
    if (weight != weight) errors.report(Argument::kWeights, Fault::kNotANumber, i, 0, 0);
    A result = products.with_row;
    if (used && w.reciprocals != nullptr) {
      const A reciprocal = w.reciprocals[bag];
      const A share = w.reduction == Reduction::kMean ? A(1) : weight * reciprocal;
      result = reciprocal == A(0) ? A(0) : (products.with_row - products.with_output * share) * reciprocal;
    }
    out[i] = static_cast<T>(result);
  }
}

template <class T, class I, int width>
void launch_weights_backward(DeviceCall& call, const WeightsBackward<T>& w, const I* indices, const Tensor& out) {
  const int64_t entries = out.size(0);
  // One tile per entry: a team's lanes take every column.
  const RowTiling tiling(entries, std::min<int64_t>(w.columns, kWarp * width), width);
  launch(call, tiling.shape(), weights_backward_kernel<T, I, width>, w, indices, entries, call.errors(), tiling,
         static_cast<T*>(out.data_ptr()));
}

Tensor embedding_weights_backward_cuda(const Tensor& grad, const Tensor& weight, const Tensor& indices,
                                       const Tensor& offsets, const Tensor& per_sample_weights, const Tensor& output,
                                       int64_t mode, int64_t padding_idx) {
  DeviceCall call("embedding_weights_backward", grad);
  const Reduction reduction =
      check_embedding_weights_backward(grad, weight, indices, offsets, per_sample_weights, output, mode, padding_idx);
  const Indices ids{indices.scalar_type(), call.data(indices), indices.size(0), weight.size(0), padding_idx};
  const BagOf bag_of{bag_offsets(call, offsets, ids.entries), offsets.size(0) - 1};
  const int64_t* const bags = entry_bags(call, bag_of, ids.entries);
  const void* const reciprocals = reduction == Reduction::kSum ? nullptr
                                                               : bag_reciprocals(call, weight.scalar_type(), ids,
                                                                                 bag_of, per_sample_weights, reduction);
  const Tensor out = call.empty({ids.entries}, grad.scalar_type());
  dispatch_float(weight.scalar_type(), call.op(), "weight", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    constexpr int wide = 16 / sizeof(T);
    const T *const grads = call.data<T>(grad), *const rows = call.data<T>(weight),
                   *const outputs = call.data<T>(output);
    const WeightsBackward<T> w{grads,
                               rows,
                               outputs,
                               ids.rows,
                               weight.size(1),
                               padding_idx,
                               bags,
                               call.data<T>(per_sample_weights),
                               static_cast<const acc_t<T>*>(reciprocals),
                               reduction,
                               vector_width<T>(weight.size(1), {grads, rows, outputs}) == wide};
    dispatch_index(ids.dtype, call.op(), "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const I* const data = static_cast<const I*>(ids.data);
      if (w.columns % wide == 0) {
        launch_weights_backward<T, I, wide>(call, w, data, out);
      } else {
        launch_weights_backward<T, I, 1>(call, w, data, out);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding_dense_backward", &tsr::embedding_dense_backward_cuda);
  TSR_IMPL(m, "embedding_sparse_backward", &tsr::embedding_sparse_backward_cuda);
  TSR_IMPL(m, "embedding_weights_backward", &tsr::embedding_weights_backward_cuda);
}
