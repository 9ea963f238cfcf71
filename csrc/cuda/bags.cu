#include "bags.cuh"

namespace tsr {
namespace {

// One thread per offset checks it and copies it, kept within [0, entries].
template <class O>
__global__ void bag_offsets_kernel(const O* given, int64_t bags, int64_t entries, ErrorSink errors, int64_t* offsets) {
  for (int64_t b = thread_index(); b <= bags; b += thread_count()) {
    const int64_t offset = given[b];
    if (b == 0 && offset != 0) {
      errors.report(Argument::kOffsets, Fault::kNotFirst, b, offset, 0);
    } else if (b > 0 && offset < given[b - 1]) {
      errors.report(Argument::kOffsets, Fault::kDecreasing, b, offset, given[b - 1]);
    } else if (b == bags && offset != entries) {
      errors.report(Argument::kOffsets, Fault::kNotLast, b, offset, entries);
    }
    offsets[b] = offset < 0 ? 0 : offset > entries ? entries : offset;
  }
}

// One thread per weight checks it and widens it to the accumulator's type; NaN counts as zero.
template <class T>
__global__ void entry_weights_kernel(const T* given, int64_t entries, ErrorSink errors, acc_t<T>* weights) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const acc_t<T> weight = static_cast<acc_t<T>>(given[i]);
    const bool is_nan = weight != weight;
    if (is_nan) errors.report(Argument::kWeights, Fault::kNotANumber, i, 0, 0);
    weights[i] = is_nan ? acc_t<T>(0) : weight;
  }
}

// One thread per bag: the divisor of mean or sqrtn, as pool_rows has it.
template <class A, class I>
__global__ void divisors_kernel(BagsView<I> bags, const A* weights, Reduction reduction, A* divisors) {
  for (int64_t b = thread_index(); b < bags.bags; b += thread_count()) {
    A total = 0;
    int64_t count = 0;
    for (int64_t i = bags.offsets[b]; i < bags.offsets[b + 1]; ++i) {
      if (!bags.used(i)) continue;
      ++count;
      if (weights != nullptr) total += reduction == Reduction::kMean ? weights[i] : weights[i] * weights[i];
    }
    if (weights == nullptr) total = static_cast<A>(count);
    divisors[b] = reduction == Reduction::kMean ? total : sqrt(total);
  }
}

}  // namespace

const int64_t* bag_offsets(DeviceCall& call, const Tensor& offsets, int64_t entries) {
  const int64_t bags = offsets.size(0) - 1;
  int64_t* const checked = call.workspace<int64_t>(bags + 1);
  dispatch_index(offsets.scalar_type(), call.op(), "offsets", [&](auto tag) {
    using O = typename decltype(tag)::type;
    launch(call, one_thread_each(bags + 1), bag_offsets_kernel<O>, call.data<O>(offsets), bags, entries, call.errors(),
           checked);
  });
  return checked;
}

template <class T>
const acc_t<T>* entry_weights(DeviceCall& call, const std::optional<Tensor>& per_sample_weights) {
  if (!per_sample_weights) return nullptr;
  const int64_t entries = per_sample_weights->size(0);
  acc_t<T>* const weights = call.workspace<acc_t<T>>(entries);
  launch(call, one_thread_each(entries), entry_weights_kernel<T>, call.data<T>(*per_sample_weights), entries,
         call.errors(), weights);
  return weights;
}

template <class A>
const A* bag_divisors(DeviceCall& call, const Tensor& indices, int64_t rows, int64_t padding_idx,
                      const int64_t* offsets, int64_t bags, const A* weights, Reduction reduction) {
  A* const divisors = call.workspace<A>(bags);
  dispatch_index(indices.scalar_type(), call.op(), "indices", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const BagsView<I> view{call.data<I>(indices), rows, padding_idx, offsets, bags};
    launch(call, one_thread_each(bags), divisors_kernel<A, I>, view, weights, reduction, divisors);
  });
  return divisors;
}

template const float* entry_weights<float>(DeviceCall&, const std::optional<Tensor>&);
template const double* entry_weights<double>(DeviceCall&, const std::optional<Tensor>&);
template const float* entry_weights<Half>(DeviceCall&, const std::optional<Tensor>&);
template const float* entry_weights<BFloat16>(DeviceCall&, const std::optional<Tensor>&);
template const float* bag_divisors<float>(DeviceCall&, const Tensor&, int64_t, int64_t, const int64_t*, int64_t,
                                          const float*, Reduction);
template const double* bag_divisors<double>(DeviceCall&, const Tensor&, int64_t, int64_t, const int64_t*, int64_t,
                                            const double*, Reduction);

}  // namespace tsr
