#include "../cuda.h"
#include "../embedding.h"
#include "bags.cuh"
#include "device.cuh"
#include "pool.cuh"
#include "row_groups.cuh"

namespace tsr {
namespace {

// ---- Gradient with respect to weight --------------------------------------------------------------------------------

// What an entry adds to its row: coefficient * grad[bag]. Null pointers stand for: each entry its own bag; ones; ones.
template <class A>
struct EntryGradients {
  const int64_t* offsets;
  int64_t bags;
  const A* weights;
  const A* divisors;
};

// One thread per sorted entry looks up its bag and coefficient, and its position where max asks for it.
template <class A, class K>
__global__ void entry_sources_kernel(const K* sorted, int64_t entries, EntryGradients<A> gradients, int64_t* sources,
                                     A* coefficients, int64_t* positions) {
  for (int64_t j = thread_index(); j < entries; j += thread_count()) {
    const int64_t i = static_cast<int64_t>(sorted[j]);
    const int64_t bag = gradients.offsets == nullptr ? i : bag_of(gradients.offsets, gradients.bags, i);
    sources[j] = bag;
    if (positions != nullptr) positions[j] = i;
    if (coefficients == nullptr) continue;
    const A divisor = gradients.divisors == nullptr || bag < 0 ? A(1) : gradients.divisors[bag];
    const A weight = gradients.weights == nullptr ? A(1) : gradients.weights[i];
    coefficients[j] = divisor == A(0) ? A(0) : weight / divisor;
  }
}

// A team owns a tile of out[r, :], the gradient of mode max: each lane adds up grad where its entries won.
template <class T>
__global__ void max_backward_kernel(const T* grad, const int64_t* argmax, const int64_t* sources,
                                    const int64_t* positions, const int64_t* offsets, int64_t columns,
                                    bool divide_by_count, RowTiling tiling, T* out) {
  using A = acc_t<T>;
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    if (tile.column >= columns) continue;
    const int64_t begin = offsets[tile.row], end = offsets[tile.row + 1];
    A sum = 0;
    for (int64_t j = begin; j < end; ++j) {
      // grad[bag, column]
      const int64_t at = sources[j] * columns + tile.column;
      if (sources[j] >= 0 && argmax[at] == positions[j]) sum += static_cast<A>(grad[at]);
    }
    const A divisor = divide_by_count && end > begin ? static_cast<A>(end - begin) : A(1);
    out[tile.row * columns + tile.column] = static_cast<T>(sum / divisor);
  }
}

// The gradient's entries grouped by row, ready to be added up over any set of rows.
struct WeightGradient {
  RowGroups groups;
  const void* grad;
  int64_t bags;
  const int64_t* argmax;     // mode max, else null
  const int64_t* sources;    // per sorted entry, its bag
  const int64_t* positions;  // mode max: per sorted entry, its position
  const void* coefficients;  // per sorted entry, in the accumulator's type; null for ones
  bool scale_grad_by_freq;
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

template <class T>
EntryGradients<acc_t<T>> entry_gradients(DeviceCall& call, const BackwardInputs& in) {
  EntryGradients<acc_t<T>> gradients{nullptr, in.grad.size(0), nullptr, nullptr};
  if (!in.offsets) return gradients;
  gradients.offsets = bag_offsets(call, *in.offsets, in.indices.size(0));
  gradients.weights = entry_weights<T>(call, in.per_sample_weights);
  if (in.reduction == Reduction::kMean || in.reduction == Reduction::kSqrtN) {
    gradients.divisors = bag_divisors(call, in.indices, in.num_embeddings, in.padding_idx, gradients.offsets,
                                      gradients.bags, gradients.weights, in.reduction);
  }
  return gradients;
}

template <class T>
WeightGradient group_weight_gradient(DeviceCall& call, const BackwardInputs& in, bool scale_grad_by_freq) {
  const int64_t entries = in.indices.size(0);
  const EntryGradients<acc_t<T>> gradients = entry_gradients<T>(call, in);
  const RowGroups groups =
      group_by_row(call, in.indices.scalar_type(), call.data(in.indices), entries, in.num_embeddings, in.padding_idx);
  const bool is_max = in.reduction == Reduction::kMax;
  int64_t* const sources = call.workspace<int64_t>(entries);
  int64_t* const positions = is_max ? call.workspace<int64_t>(entries) : nullptr;
  acc_t<T>* const coefficients =
      gradients.weights != nullptr || gradients.divisors != nullptr ? call.workspace<acc_t<T>>(entries) : nullptr;
  with_pairs(groups, [&](const auto& pairs) {
    using K = std::remove_pointer_t<decltype(pairs.keys)>;
    launch(call, one_thread_each(entries), entry_sources_kernel<acc_t<T>, K>, pairs.positions, entries, gradients,
           sources, coefficients, positions);
  });
  const int64_t* const argmax = is_max ? call.data<int64_t>(*in.argmax) : nullptr;
  return {groups, call.data(in.grad), gradients.bags, argmax, sources, positions, coefficients, scale_grad_by_freq};
}

// Adds up the rows whose sorted entries `offsets` delimits: the rows of out.
template <class T>
void write_weight_gradient(DeviceCall& call, const WeightGradient& gradient, const int64_t* offsets,
                           const Tensor& out) {
  const int64_t rows = out.size(0), columns = out.size(1);
  if (gradient.argmax != nullptr) {
    const RowTiling tiling(rows, columns, 1);
    launch(call, tiling.shape(), max_backward_kernel<T>, static_cast<const T*>(gradient.grad), gradient.argmax,
           gradient.sources, gradient.positions, offsets, columns, gradient.scale_grad_by_freq, tiling,
           static_cast<T*>(out.data_ptr()));
    return;
  }
  Pooling pooling;
  pooling.dtype = out.scalar_type();
  pooling.table = gradient.grad;
  pooling.rows = gradient.bags;
  pooling.columns = columns;
  pooling.indices = gradient.sources;
  pooling.entries = gradient.groups.entries;
  pooling.offsets = offsets;
  pooling.bags = rows;
  pooling.out = out.data_ptr();
  pooling.weights = gradient.coefficients;
  pooling.divisor = gradient.scale_grad_by_freq ? Divisor::kCount : Divisor::kOne;
  pooling.report = false;  // sources are our own
  pool_rows(call, pooling);
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
  dispatch_float(grad.scalar_type(), call.op(), "grad", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const WeightGradient gradient = group_weight_gradient<T>(call, in, scale_grad_by_freq);
    write_weight_gradient<T>(call, gradient, dense_offsets(call, gradient.groups), out);
  });
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
  return dispatch_float(grad.scalar_type(), call.op(), "grad", [&](auto tag) -> std::tuple<Tensor, Tensor> {
    using T = typename decltype(tag)::type;
    const WeightGradient gradient = group_weight_gradient<T>(call, in, scale_grad_by_freq);
    const PresentRows present = present_rows(call, gradient.groups);
    const Tensor values = call.empty({present.count, grad.size(1)}, grad.scalar_type());
    const Tensor rows = call.empty({present.count}, ScalarType::Long);
    write_row_ids(call, gradient.groups, present, rows);
    write_weight_gradient<T>(call, gradient, present.offsets, values);
    return {values, rows};
  });
}

// ---- Gradient with respect to per_sample_weights --------------------------------------------------------------------

template <class T>
struct WeightsBackward {
  const T* grad;    // [B, D]
  const T* weight;  // [V, D]
  const T* output;  // [B, D]
  int64_t columns;
  const acc_t<T>* weights;   // [N]
  const acc_t<T>* divisors;  // [B], null for sum
  Reduction reduction;
};

// A team owns out[i]: its lanes share the columns of <grad[b], x_i> and <grad[b], output[b]>, and add up in a fixed
// tree.
template <class T, class I>
__global__ void weights_backward_kernel(WeightsBackward<T> w, BagsView<I> bags, int64_t entries, ErrorSink errors,
                                        RowTiling tiling, T* out) {
  using A = acc_t<T>;
  const int lanes = 1 << tiling.lanes_log2;
  for (int64_t i = tiling.first(); i < entries; i += tiling.stride()) {
    const int64_t index = bags.indices[i], bag = bag_of(bags.offsets, bags.bags, i);
    const int64_t lane = tiling.at(0).column;
    if ((index < 0 || index >= bags.rows) && lane == 0) {
      errors.report(Argument::kIndices, Fault::kOutOfRange, i, index, bags.rows);
    }
    const bool used = bags.used(i) && bag >= 0;
    A with_row = 0, with_output = 0;
    for (int64_t c = lane; used && c < w.columns; c += lanes) {
      const A grad = static_cast<A>(w.grad[bag * w.columns + c]);
      with_row += grad * static_cast<A>(w.weight[index * w.columns + c]);
      if (w.divisors != nullptr) with_output += grad * static_cast<A>(w.output[bag * w.columns + c]);
    }
    for (int step = lanes / 2; step > 0; step /= 2) {
      with_row += __shfl_xor_sync(tiling.team_mask(), with_row, step);
      with_output += __shfl_xor_sync(tiling.team_mask(), with_output, step);
    }
    if (lane != 0) continue;
    A result = with_row;
    if (used && w.divisors != nullptr) {
      const A divisor = w.divisors[bag];
      const A share = w.reduction == Reduction::kMean ? A(1) : divisor == A(0) ? A(0) : w.weights[i] / divisor;
      result = divisor == A(0) ? A(0) : (with_row - with_output * share) / divisor;
    }
    out[i] = static_cast<T>(result);
  }
}

template <class T, class I>
void write_weights_gradient(DeviceCall& call, const WeightsBackward<T>& w, const BagsView<I>& bags, const Tensor& out) {
  const int64_t entries = out.size(0);
  // One tile per entry: a team's lanes take every column.
  const RowTiling tiling(entries, std::min<int64_t>(w.columns, kWarp), 1);
  launch(call, tiling.shape(), weights_backward_kernel<T, I>, w, bags, entries, call.errors(), tiling,
         static_cast<T*>(out.data_ptr()));
}

Tensor embedding_weights_backward_cuda(const Tensor& grad, const Tensor& weight, const Tensor& indices,
                                       const Tensor& offsets, const Tensor& per_sample_weights, const Tensor& output,
                                       int64_t mode, int64_t padding_idx) {
  DeviceCall call("embedding_weights_backward", grad);
  const Reduction reduction =
      check_embedding_weights_backward(grad, weight, indices, offsets, per_sample_weights, output, mode, padding_idx);
  const int64_t bags = offsets.size(0) - 1, rows = weight.size(0);
  const int64_t* const checked = bag_offsets(call, offsets, indices.size(0));
  const Tensor out = call.empty({indices.size(0)}, grad.scalar_type());
  dispatch_float(weight.scalar_type(), call.op(), "weight", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    const acc_t<T>* const weights = entry_weights<T>(call, per_sample_weights);
    const acc_t<T>* const divisors = reduction == Reduction::kSum ? nullptr
                                                                  : bag_divisors(call, indices, rows, padding_idx,
                                                                                 checked, bags, weights, reduction);
    const WeightsBackward<T> w{
        call.data<T>(grad), call.data<T>(weight), call.data<T>(output), weight.size(1), weights, divisors, reduction};
    dispatch_index(indices.scalar_type(), call.op(), "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const BagsView<I> view{call.data<I>(indices), rows, padding_idx, checked, bags};
      write_weights_gradient<T, I>(call, w, view, out);
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
