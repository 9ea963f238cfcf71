// sparse_reorder and sparse_to_dense: what depends on the order of entries.
#include "../cuda.h"
#include "../sparse_tensor.h"
#include "device.cuh"
#include "primitives.cuh"

namespace tsr {
namespace {

// ---- Reorder --------------------------------------------------------------------------------------------------------

// One thread per entry.
__global__ void number_entries_kernel(int64_t entries, uint64_t* order) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) order[i] = static_cast<uint64_t>(i);
}

constexpr uint64_t kSign = UINT64_C(1) << 63;

// One thread per entry takes one column as unsigned numbers in the same order.
__global__ void take_column_kernel(Column<int64_t> column, const uint64_t* order, int64_t entries, uint64_t* keys) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    keys[i] = static_cast<uint64_t>(column[static_cast<int64_t>(order[i])]) ^ kSign;
  }
}

// One thread per entry.
__global__ void take_entries_kernel(const int64_t* indices, const uint64_t* order, int64_t entries, int64_t rank,
                                    int64_t* out, int64_t* permutation) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const int64_t from = static_cast<int64_t>(order[i]);
    permutation[i] = from;
    for (int64_t d = 0; d < rank; ++d) out[i * rank + d] = indices[from * rank + d];
  }
}

// Sorts by the last column, then stably by the one before, and so on.
std::tuple<Tensor, Tensor> sparse_reorder_cuda(const Tensor& given) {
  check_sparse_reorder(given);
  DeviceCall call("sparse_reorder", given);
  const int64_t entries = given.size(0), rank = given.size(1);
  const Tensor out = call.empty({entries, rank}, ScalarType::Long);
  const Tensor permutation = call.empty({entries}, ScalarType::Long);
  const int64_t* const indices = call.data<int64_t>(given);
  Pairs<uint64_t> from{call.workspace<uint64_t>(entries), call.workspace<uint64_t>(entries)};
  Pairs<uint64_t> spare{call.workspace<uint64_t>(entries), call.workspace<uint64_t>(entries)};
  launch(call, one_thread_each(entries), number_entries_kernel, entries, from.values);
  for (int64_t d = rank; d-- > 0;) {
    launch(call, one_thread_each(entries), take_column_kernel, Column<int64_t>{indices + d, rank}, from.values, entries,
           from.keys);
    const Pairs<uint64_t> sorted = sort_pairs(call, from, spare, entries, 64);
    if (sorted.keys != from.keys) std::swap(from, spare);
  }
  launch(call, one_thread_each(entries), take_entries_kernel, indices, from.values, entries, rank,
         static_cast<int64_t*>(out.data_ptr()), static_cast<int64_t*>(permutation.data_ptr()));
  return {out, permutation};
}

// ---- To dense -------------------------------------------------------------------------------------------------------

// An entry's element of the dense tensor, or -1 for an entry that is refused.
struct Elements {
  DenseShape shape;
  const int64_t* indices;
  bool validate;
  ErrorSink errors;

  __device__ int64_t operator()(int64_t i) const {
    int64_t column = 0;
    const int64_t* const index = indices + i * shape.rank;
    const int64_t element = shape.element(index, column);
    if (element < 0) {
      errors.report(Argument::kIndices, Fault::kOutOfRange, i, index[column], shape.sizes[column],
                    static_cast<int32_t>(column));
      return -1;
    }
    const int64_t before = validate && i > 0 ? shape.element(index - shape.rank, column) : -1;
    if (element > before) return element;
    const Fault fault = element == before ? Fault::kRepeatedIndex : Fault::kUnsortedIndex;
    errors.report(Argument::kIndices, fault, i, element, before);
    return -1;
  }
};

// One thread per element.
template <class T>
__global__ void fill_dense_kernel(const T* default_value, int64_t size, T* dense) {
  for (int64_t m = thread_index(); m < size; m += thread_count()) dense[m] = *default_value;
}

// One thread per entry: validated entries have an element each.
template <class T>
__global__ void write_entries_kernel(Elements elements, int64_t entries, const T* values, T* dense) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const int64_t element = elements(i);
    if (element >= 0) dense[element] = values[i];
  }
}

// One thread per entry: the last of an element's entries is its owner, counted from 1.
template <class P>
__global__ void own_elements_kernel(Elements elements, int64_t entries, P* owners) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const int64_t element = elements(i);
    if (element >= 0) atomicMax(&owners[element], static_cast<P>(i + 1));
  }
}

// One thread per element.
template <class T, class P>
__global__ void write_dense_kernel(const P* owners, const T* values, const T* default_value, int64_t size, T* dense) {
  for (int64_t m = thread_index(); m < size; m += thread_count()) {
    dense[m] = owners[m] == 0 ? *default_value : values[owners[m] - 1];
  }
}

template <class T, class P>
void write_last_entries(DeviceCall& call, const Elements& elements, int64_t entries, const T* values,
                        const T* default_value, int64_t size, T* dense) {
  P* const owners = call.workspace<P>(size);
  fill_bytes(call.stream(), owners, 0, static_cast<size_t>(size) * sizeof(P));
  launch(call, one_thread_each(entries), own_elements_kernel<P>, elements, entries, owners);
  launch(call, one_thread_each(size), write_dense_kernel<T, P>, owners, values, default_value, size, dense);
}

// Entries from which on an owner takes 64 bits. Emulated, few entries reach both kinds.
#ifdef TSR_EMULATED
constexpr int64_t kNarrowEntries = 39;
#else
constexpr int64_t kNarrowEntries = INT64_C(0xffffffff);
#endif

Tensor sparse_to_dense_cuda(const Tensor& indices, std::vector<int64_t> shape, const Tensor& values_,
                            const Tensor& default_value_, bool validate) {
  const int64_t size = check_sparse_to_dense(indices, shape, values_, default_value_), entries = indices.size(0);
  DeviceCall call("sparse_to_dense", indices);
  call.asks("the elements of shape", size);
  const Tensor out = call.empty(shape, values_.scalar_type());
  const Elements elements{DenseShape(shape), call.data<int64_t>(indices), validate, call.errors()};
  dispatch_element(call.op(), values_, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const values = call.data<T>(values_);
    const T* const default_value = call.data<T>(default_value_);
    T* const dense = static_cast<T*>(out.data_ptr());
    if (validate) {
      launch(call, one_thread_each(size), fill_dense_kernel<T>, default_value, size, dense);
      launch(call, one_thread_each(entries), write_entries_kernel<T>, elements, entries, values, dense);
    } else if (entries < kNarrowEntries) {
      write_last_entries<T, unsigned>(call, elements, entries, values, default_value, size, dense);
    } else {
      write_last_entries<T, unsigned long long>(call, elements, entries, values, default_value, size, dense);
    }
  });
  return out;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "sparse_reorder", &tsr::sparse_reorder_cuda);
  TSR_IMPL(m, "sparse_to_dense", &tsr::sparse_to_dense_cuda);
}
