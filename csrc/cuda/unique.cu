#include "../cuda.h"
#include "../unique.h"
#include "primitives.cuh"

namespace tsr {
namespace {

// Values are compared by their bits, in the unsigned type of their width.
template <class F>
void dispatch_width(const Tensor& x, const F& f) {
  switch (x.element_size()) {
    case 1:
      return f(type_tag<uint8_t>{});
    case 2:
      return f(type_tag<uint16_t>{});
    case 4:
      return f(type_tag<uint32_t>{});
    default:
      return f(type_tag<uint64_t>{});
  }
}

// A table of keys, open addressing with linear probing, and the first position of each. Which slot a key gets depends
// on the order of the threads; its first position does not. Slots are filled with ones at first: the key of all ones
// cannot be told from an empty slot, so that it has one of its own behind the others.
struct FirstPositions {
  unsigned long long* keys;   // [capacity]
  unsigned long long* first;  // [capacity + 1]
  int64_t capacity;           // a power of two

  static constexpr unsigned long long kEmpty = ~0ull;

  __device__ int64_t slot_of(unsigned long long key) const {
    if (key == kEmpty) return capacity;
    unsigned long long hash = key;
    hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdull;
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53ull;
    hash ^= hash >> 33;
    for (int64_t slot = static_cast<int64_t>(hash) & (capacity - 1);; slot = (slot + 1) & (capacity - 1)) {
      unsigned long long found = keys[slot];
      if (found == kEmpty) found = atomicCAS(&keys[slot], kEmpty, key);
      if (found == kEmpty || found == key) return slot;
    }
  }
};

// One thread per element enters it and remembers its slot.
template <class T>
__global__ void enter_kernel(const T* x, int64_t n, FirstPositions table, int64_t* slots) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    const int64_t slot = table.slot_of(static_cast<unsigned long long>(x[i]));
    slots[i] = slot;
    atomicMin(&table.first[slot], static_cast<unsigned long long>(i));
  }
}

// One thread per element says whether it is the first of its value.
__global__ void flag_first_kernel(const unsigned long long* first, const int64_t* slots, int64_t n, uint8_t* is_first) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    is_first[i] = first[slots[i]] == static_cast<unsigned long long>(i);
  }
}

// One thread per element: its value's number is the number of first elements before that value's own first.
template <class T>
__global__ void write_unique_kernel(const T* x, int64_t n, const unsigned long long* first, const int64_t* slots,
                                    const int64_t* firsts_before, T* values, int64_t* inverse,
                                    unsigned long long* counts) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    const int64_t first_position = static_cast<int64_t>(first[slots[i]]);
    const int64_t number = firsts_before[first_position];
    inverse[i] = number;
    if (first_position == i) values[number] = x[i];
    if (counts != nullptr) atomicAdd(&counts[number], 1ull);  // integers: the order does not matter
  }
}

struct Unique {
  Tensor values, inverse, counts;
};

FirstPositions empty_table(DeviceCall& call, int64_t n) {
  int64_t capacity = 2;
  while (capacity < 2 * n) capacity *= 2;
  const FirstPositions table{call.workspace<unsigned long long>(capacity),
                             call.workspace<unsigned long long>(capacity + 1), capacity};
  fill_bytes(call.stream(), table.keys, 0xff, capacity * sizeof(*table.keys));
  fill_bytes(call.stream(), table.first, 0xff, (capacity + 1) * sizeof(*table.first));
  return table;
}

Unique unique_of(DeviceCall& call, const Tensor& x, bool with_counts) {
  const int64_t n = x.size(0);
  const FirstPositions table = empty_table(call, n);
  int64_t* const slots = call.workspace<int64_t>(n);
  uint8_t* const is_first = call.workspace<uint8_t>(n + 1);
  int64_t* const firsts_before = call.workspace<int64_t>(n + 1);
  Unique result{x, call.empty({n}, ScalarType::Long), x};
  dispatch_width(x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const values = call.data<T>(x);
    launch(call, one_thread_each(n), enter_kernel<T>, values, n, table, slots);
    launch(call, one_thread_each(n), flag_first_kernel, table.first, slots, n, is_first);
    count_before(call, is_first, n, firsts_before);
    const int64_t distinct = call.read_back(firsts_before + n, "the number of distinct values");
    result.values = call.empty({distinct}, x.scalar_type());
    unsigned long long* counts = nullptr;
    if (with_counts) {
      result.counts = call.empty({distinct}, ScalarType::Long);
      counts = static_cast<unsigned long long*>(result.counts.data_ptr());
      fill_bytes(call.stream(), counts, 0, distinct * sizeof(*counts));
    }
    launch(call, one_thread_each(n), write_unique_kernel<T>, values, n, table.first, slots, firsts_before,
           static_cast<T*>(result.values.data_ptr()), static_cast<int64_t*>(result.inverse.data_ptr()), counts);
  });
  return result;
}

std::tuple<Tensor, Tensor> unique_cuda(const Tensor& x) {
  DeviceCall call("unique", x);
  check_unique(call.op(), x);
  const Unique result = unique_of(call, x, /*with_counts=*/false);
  return {result.values, result.inverse};
}

std::tuple<Tensor, Tensor, Tensor> unique_with_counts_cuda(const Tensor& x) {
  DeviceCall call("unique_with_counts", x);
  check_unique(call.op(), x);
  const Unique result = unique_of(call, x, /*with_counts=*/true);
  return {result.values, result.inverse, result.counts};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "unique", &tsr::unique_cuda);
  TSR_IMPL(m, "unique_with_counts", &tsr::unique_with_counts_cuda);
}
