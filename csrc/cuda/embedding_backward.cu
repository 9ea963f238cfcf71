#include "../cuda.h"
#include "../embedding.h"
#include "bags.cuh"
#include "device.cuh"
#include "embedding_bags.cuh"
#include "pool.cuh"
#include "row_groups.cuh"

namespace tsr {

const void* bag_divisors(DeviceCall& call, ScalarType dtype, const Indices& indices, const BagOf& bags,
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
  return pool_divisors(call, pooling);
}

namespace {

// The gradient's entries grouped by row, ready to be added up over any set of rows.
struct WeightGradient {
  RowGroups groups;
  Pooling pooling;  // all but the rows it writes
  // Of extremes: the positions that won, [bags, columns], and the position of each sorted entry.
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
  bool include_last_offset;
};

// One thread per bag.
template <class A>
__global__ void reciprocals_kernel(const A* divisors, int64_t bags, A* reciprocals) {
  for (int64_t b = thread_index(); b < bags; b += thread_count()) {
    reciprocals[b] = divisors[b] == A(0) ? A(0) : A(1) / divisors[b];
  }
}

// One thread per sorted entry puts its bag in the place of its position. With weights it says what the bag's row
// counts for the entry's: weight / divisor, zero for a NaN weight; for extremes where the position was.
template <class T, class K>
__global__ void sorted_entries_kernel(K* sorted, int64_t entries, const int64_t* bags, const T* weights,
                                      const acc_t<T>* divisors, ErrorSink errors, acc_t<T>* coefficients,
                                      int64_t* positions) {
  using A = acc_t<T>;
  for (int64_t j = thread_index(); j < entries; j += thread_count()) {
    const int64_t i = static_cast<int64_t>(sorted[j]), bag = bags[i];
    sorted[j] = static_cast<K>(bag);
    if (positions != nullptr) positions[j] = i;
    if (weights == nullptr) continue;
    const A weight = static_cast<A>(weights[i]);
    const bool is_nan = weight != weight;
    if (is_nan) errors.report(Argument::kWeights, Fault::kNotANumber, i, 0, 0);
    const A divisor = divisors == nullptr || bag < 0 ? A(1) : divisors[bag];
    coefficients[j] = is_nan || divisor == A(0) ? A(0) : weight / divisor;
  }
}

// Groups entries that need more than their bag. divisors: of the bags, or none.
void group_weighted_or_won(DeviceCall& call, const BackwardInputs& in, const Indices& indices, const BagOf& bag_of,
                           const void* divisors, WeightGradient& gradient) {
  gradient.groups = group_by_row(call, indices, std::max(indices.entries, bag_of.bags), EntryItself());
  const int64_t* const bags = entry_bags(call, bag_of, indices.entries);
  int64_t* positions = nullptr;
  if (is_extreme(in.reduction)) {
    gradient.winners = call.data<int64_t>(*in.argmax);
    gradient.positions = positions = call.workspace<int64_t>(indices.entries);
  }
  dispatch_float(in.grad.scalar_type(), call.op(), "grad", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const weights = in.per_sample_weights ? call.data<T>(*in.per_sample_weights) : nullptr;
    acc_t<T>* const coefficients = in.per_sample_weights ? call.workspace<acc_t<T>>(indices.entries) : nullptr;
    gradient.pooling.coefficients = coefficients;
    with_pairs(gradient.groups, [&](const auto& pairs) {
      using K = std::remove_pointer_t<decltype(pairs.values)>;
      launch(call, one_thread_each(indices.entries), sorted_entries_kernel<T, K>, pairs.values, indices.entries, bags,
             weights, static_cast<const acc_t<T>*>(divisors), call.errors(), coefficients, positions);
    });
  });
}

// Groups entries by nothing but their bag, whose row counts 1 / divisor for each.
void group_plain(DeviceCall& call, const BackwardInputs& in, const Indices& indices, const BagOf& bag_of,
                 const void* divisors, WeightGradient& gradient) {
  gradient.groups = group_by_row(call, indices, bag_of.bags, bag_of);
  if (divisors == nullptr) return;
  dispatch_float(in.grad.scalar_type(), call.op(), "grad", [&](auto tag) {
    using A = acc_t<typename decltype(tag)::type>;
    A* const reciprocals = call.workspace<A>(bag_of.bags);
    launch(call, one_thread_each(bag_of.bags), reciprocals_kernel<A>, static_cast<const A*>(divisors), bag_of.bags,
           reciprocals);
    gradient.pooling.scales = reciprocals;
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
    const BagOf bags{bag_offsets(call, *in.offsets, indices.entries, in.include_last_offset), in.grad.size(0)};
    const void* divisors = nullptr;
    if (is_divided(in.reduction)) {
      divisors = bag_divisors(call, in.grad.scalar_type(), indices, bags, in.per_sample_weights, in.reduction);
    }
    if (in.per_sample_weights || is_extreme(in.reduction)) {
      group_weighted_or_won(call, in, indices, bags, divisors, gradient);
    } else {
      group_plain(call, in, indices, bags, divisors, gradient);
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
                                     int64_t padding_idx, bool scale_grad_by_freq, bool include_last_offset) {
  const Reduction reduction = check_embedding_backward(grad, indices, offsets, per_sample_weights, argmax,
                                                       num_embeddings, mode, padding_idx, include_last_offset);
  DeviceCall call("embedding_backward", grad);
  const BackwardInputs in{grad,           indices,   offsets,     per_sample_weights, argmax,
                          num_embeddings, reduction, padding_idx, include_last_offset};
  call.asks("num_embeddings", num_embeddings);
  const Tensor out = call.empty({num_embeddings, grad.size(1)}, grad.scalar_type());
  const WeightGradient gradient = group_weight_gradient(call, in, scale_grad_by_freq);
  if (out.numel() > 0) write_weight_gradient(call, gradient, dense_offsets(call, gradient.groups), out);
  return out;
}

std::tuple<Tensor, Tensor> embedding_sparse_backward_cuda(const Tensor& grad, const Tensor& indices,
                                                          const std::optional<Tensor>& offsets,
                                                          const std::optional<Tensor>& per_sample_weights,
                                                          const std::optional<Tensor>& argmax, int64_t num_embeddings,
                                                          int64_t mode, int64_t padding_idx, bool scale_grad_by_freq,
                                                          bool include_last_offset) {
  const Reduction reduction = check_embedding_backward(grad, indices, offsets, per_sample_weights, argmax,
                                                       num_embeddings, mode, padding_idx, include_last_offset);
  DeviceCall call("embedding_backward", grad);
  const BackwardInputs in{grad,           indices,   offsets,     per_sample_weights, argmax,
                          num_embeddings, reduction, padding_idx, include_last_offset};
  const WeightGradient gradient = group_weight_gradient(call, in, scale_grad_by_freq);
  const PresentRows present = present_rows(call, gradient.groups);
  const Tensor values = call.empty({present.count, grad.size(1)}, grad.scalar_type());
  const Tensor rows = call.empty({present.count}, ScalarType::Long);
  write_row_ids(call, gradient.groups, present, rows);
  write_weight_gradient(call, gradient, present.offsets, values);
  return {values, rows};
}

Tensor embedding_coo_backward_cuda(const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
                                   const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
                                   int64_t num_embeddings, int64_t mode, int64_t padding_idx, bool scale_grad_by_freq,
                                   bool include_last_offset) {
  const auto [values, rows] =
      embedding_sparse_backward_cuda(grad, indices, offsets, per_sample_weights, argmax, num_embeddings, mode,
                                     padding_idx, scale_grad_by_freq, include_last_offset);
  return coo_gradient("embedding_coo_backward", "num_embeddings", values, rows, num_embeddings);
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding_dense_backward", &tsr::embedding_dense_backward_cuda);
  TSR_IMPL(m, "embedding_sparse_backward", &tsr::embedding_sparse_backward_cuda);
  TSR_IMPL(m, "embedding_coo_backward", &tsr::embedding_coo_backward_cuda);
}
