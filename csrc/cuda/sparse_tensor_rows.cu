// sparse_fill_empty_rows and its gradient.
//
// Which rows have entries is a bit each. With the entries in the order of their rows, entry k of row r goes to
// k + r - (rows below r that have entries): after all entries before it and one more for each empty row below r.
#include "../cuda.h"
#include "../sparse_tensor.h"
#include "device.cuh"
#include "primitives.cuh"

namespace tsr {
namespace {

// ---- Rows -----------------------------------------------------------------------------------------------------------

// What is read back: it lies after the counts of rows, the last of which is its first member.
struct Found {
  int64_t present;
  unsigned long long unsorted;
  unsigned long long first_bad;
};

// One thread per entry flags its row, unless the entry before it does.
__global__ void flag_rows_kernel(Column<int64_t> rows, int64_t entries, int64_t num_rows, uint32_t* present,
                                 unsigned long long* unsorted, unsigned long long* first_bad) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const int64_t row = rows[i];
    if (row < 0 || row >= num_rows) {
      atomicMin(first_bad, static_cast<unsigned long long>(i));
      continue;
    }
    const int64_t before = i == 0 ? -1 : rows[i - 1];
    if (row < before) atomicMax(unsorted, 1ull);
    if (row != before) atomicOr(&present[row / kWarp], 1u << row % kWarp);
  }
}

// The rows that have entries.
struct PresentBits {
  const uint32_t* words;  // [num_rows / 32 + 2] flags
  const int64_t* before;  // flags before each word

  __device__ bool has(int64_t row) const { return words[row / kWarp] >> row % kWarp & 1; }
  __device__ int64_t below(int64_t row) const {
    return before[row / kWarp] + __popc(words[row / kWarp] & ((1u << row % kWarp) - 1));
  }
};

// The entries in the order of their rows: entry order[k], or k itself where there is no order, has rows[k].
template <class K>
struct RowOrder {
  Column<K> rows;
  const K* order;

  __device__ int64_t source(int64_t k) const { return order == nullptr ? k : static_cast<int64_t>(order[k]); }
};

// One thread per entry.
template <class K>
__global__ void take_rows_kernel(Column<int64_t> rows, int64_t entries, K* keys, K* positions) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    keys[i] = static_cast<K>(rows[i]);
    positions[i] = static_cast<K>(i);
  }
}

template <class K>
RowOrder<K> sorted_rows(DeviceCall& call, Column<int64_t> rows, int64_t entries, int64_t num_rows) {
  const Pairs<K> from{call.workspace<K>(entries), call.workspace<K>(entries)};
  const Pairs<K> spare{call.workspace<K>(entries), call.workspace<K>(entries)};
  launch(call, one_thread_each(entries), take_rows_kernel<K>, rows, entries, from.keys, from.values);
  int bits = 1;
  while (num_rows >> bits != 0) ++bits;
  const Pairs<K> sorted = sort_pairs(call, from, spare, entries, bits);
  return {{sorted.keys, 1}, sorted.values};
}

// ---- Filling --------------------------------------------------------------------------------------------------------

template <class T>
struct Entries {
  int64_t rank;
  const int64_t* indices;
  const T* values;
  const T* default_value;
  int64_t* out_indices;
  T* out_values;
  bool* is_empty;        // by row
  int64_t* reverse_map;  // by entry
};

// One thread per entry.
template <class T, class K>
__global__ void place_entries_kernel(Entries<T> e, RowOrder<K> order, int64_t entries, PresentBits present) {
  for (int64_t k = thread_index(); k < entries; k += thread_count()) {
    const int64_t from = order.source(k), row = static_cast<int64_t>(order.rows[k]);
    const int64_t out = k + row - present.below(row);
    for (int64_t d = 0; d < e.rank; ++d) e.out_indices[out * e.rank + d] = e.indices[from * e.rank + d];
    e.out_values[out] = e.values[from];
    e.reverse_map[from] = out;
  }
}

// One thread per row.
template <class T, class K>
__global__ void fill_rows_kernel(Entries<T> e, RowOrder<K> order, int64_t entries, PresentBits present,
                                 int64_t num_rows) {
  for (int64_t row = thread_index(); row < num_rows; row += thread_count()) {
    const bool is_empty = !present.has(row);
    e.is_empty[row] = is_empty;
    if (!is_empty) continue;
    const int64_t out = lower_bound(order.rows, entries, row) + row - present.below(row);
    for (int64_t d = 0; d < e.rank; ++d) e.out_indices[out * e.rank + d] = d == 0 ? row : 0;
    e.out_values[out] = *e.default_value;
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sparse_fill_empty_rows_cuda(const Tensor& indices_, const Tensor& values,
                                                                       int64_t num_rows, const Tensor& default_value) {
  check_sparse_fill_empty_rows(indices_, values, num_rows, default_value);
  DeviceCall call("sparse_fill_empty_rows", indices_);
  call.asks("num_rows", num_rows);
  const int64_t entries = indices_.size(0), rank = indices_.size(1), words = num_rows / kWarp + 1;
  const int64_t* const indices = call.data<int64_t>(indices_);
  const Column<int64_t> rows{indices, rank};
  uint32_t* const flags = call.workspace<uint32_t>(words + 1);
  int64_t* const before = call.workspace<int64_t>(words + 3);
  auto* const unsorted = reinterpret_cast<unsigned long long*>(before + words + 1);
  auto* const first_bad = unsorted + 1;
  fill_bytes(call.stream(), flags, 0, static_cast<size_t>(words + 1) * sizeof(*flags));
  fill_bytes(call.stream(), unsorted, 0, sizeof(*unsorted));
  fill_bytes(call.stream(), first_bad, 0xff, sizeof(*first_bad));
  launch(call, one_thread_each(entries), flag_rows_kernel, rows, entries, num_rows, flags, unsorted, first_bad);
  count_bits_before(call, flags, words, before);
  const Found found = call.read_back(reinterpret_cast<const Found*>(before + words), "the number of empty rows");
  if (found.first_bad != ~0ull) {
    const int64_t i = static_cast<int64_t>(found.first_bad);
    TSR_CHECK_INDEX(false, call.op(), ": indices[", i, ", 0] must be in [0, ", num_rows, "), got ",
                    call.read_back(indices + i * rank, "a row out of range"));
  }
  const int64_t filled = entries + num_rows - found.present;
  const Tensor out_indices = call.empty({filled, rank}, ScalarType::Long);
  const Tensor out_values = call.empty({filled}, values.scalar_type());
  const Tensor is_empty = call.empty({num_rows}, ScalarType::Bool);
  const Tensor reverse_map = call.empty({entries}, ScalarType::Long);
  const PresentBits present{flags, before};
  dispatch_element(call.op(), values, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Entries<T> all{rank,
                         indices,
                         call.data<T>(values),
                         call.data<T>(default_value),
                         static_cast<int64_t*>(out_indices.data_ptr()),
                         static_cast<T*>(out_values.data_ptr()),
                         static_cast<bool*>(is_empty.data_ptr()),
                         static_cast<int64_t*>(reverse_map.data_ptr())};
    const auto fill = [&](auto order) {
      using K = std::decay_t<decltype(order.rows[0])>;
      launch(call, one_thread_each(entries), place_entries_kernel<T, K>, all, order, entries, present);
      launch(call, one_thread_each(num_rows), fill_rows_kernel<T, K>, all, order, entries, present, num_rows);
    };
    if (found.unsorted == 0) {
      fill(RowOrder<int64_t>{rows, nullptr});
    } else if (std::max(entries, num_rows) < INT64_C(1) << 32) {
      fill(sorted_rows<uint32_t>(call, rows, entries, num_rows));
    } else {
      fill(sorted_rows<uint64_t>(call, rows, entries, num_rows));
    }
  });
  return {out_values, out_indices, is_empty, reverse_map};
}

// ---- Gradient -------------------------------------------------------------------------------------------------------

// Positions that one block adds up by itself: the order does not depend on the device.
constexpr int64_t kSumBlock = 4096;

// One thread per entry.
template <class T>
__global__ void take_gradient_kernel(const int64_t* positions, int64_t entries, const T* grad, int64_t filled,
                                     ErrorSink errors, uint32_t* visited, T* d_values) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const int64_t at = positions[i];
    if (at < 0 || at >= filled) {
      errors.report(Argument::kReverseIndexMap, Fault::kOutOfRange, i, at, filled);
      d_values[i] = T(0);
      continue;
    }
    d_values[i] = grad[at];
    atomicOr(&visited[at / kWarp], 1u << at % kWarp);
  }
}

// The sum of all threads' values, for the block's first thread.
template <class A>
__device__ A block_sum(A value, A* sums) {
  sums[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  const A sum = sums[0];
  __syncthreads();
  return sum;
}

// One block per kSumBlock positions.
template <class T>
__global__ void sum_unvisited_kernel(const T* grad, const uint32_t* visited, int64_t n, int64_t blocks,
                                     sum_t<T>* sums) {
  TSR_SHARED(sum_t<T>, shared, kThreads);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t end = n < (block + 1) * kSumBlock ? n : (block + 1) * kSumBlock;
    sum_t<T> sum(0);
    for (int64_t j = block * kSumBlock + threadIdx.x; j < end; j += kThreads) {
      if ((visited[j / kWarp] >> j % kWarp & 1) == 0) sum += static_cast<sum_t<T>>(grad[j]);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) sums[block] = sum;
  }
}

// One block adds up all sums.
template <class T>
__global__ void add_sums_kernel(const sum_t<T>* sums, int64_t n, T* total) {
  TSR_SHARED(sum_t<T>, shared, kThreads);
  sum_t<T> sum(0);
  for (int64_t j = threadIdx.x; j < n; j += kThreads) sum += sums[j];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *total = static_cast<T>(sum);
}

std::tuple<Tensor, Tensor> sparse_fill_empty_rows_grad_cuda(const Tensor& reverse_index_map,
                                                            const Tensor& grad_values) {
  check_sparse_fill_empty_rows_grad(reverse_index_map, grad_values);
  DeviceCall call("sparse_fill_empty_rows_grad", grad_values);
  const int64_t entries = reverse_index_map.size(0), filled = grad_values.size(0), words = filled / kWarp + 1;
  const Tensor d_values = call.empty({entries}, grad_values.scalar_type());
  const Tensor d_default = call.empty({}, grad_values.scalar_type());
  uint32_t* const visited = call.workspace<uint32_t>(words);
  fill_bytes(call.stream(), visited, 0, static_cast<size_t>(words) * sizeof(*visited));
  dispatch_number(grad_values.scalar_type(), call.op(), "grad_values", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const grad = call.data<T>(grad_values);
    launch(call, one_thread_each(entries), take_gradient_kernel<T>, call.data<int64_t>(reverse_index_map), entries,
           grad, filled, call.errors(), visited, static_cast<T*>(d_values.data_ptr()));
    const int64_t blocks = (filled + kSumBlock - 1) / kSumBlock;
    auto* const sums = call.workspace<sum_t<T>>(blocks);
    launch(call, {std::min(blocks, kMaxBlocks)}, sum_unvisited_kernel<T>, grad, visited, filled, blocks, sums);
    launch(call, {1}, add_sums_kernel<T>, sums, blocks, static_cast<T*>(d_default.data_ptr()));
  });
  return {d_values, d_default};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "sparse_fill_empty_rows", &tsr::sparse_fill_empty_rows_cuda);
  TSR_IMPL(m, "sparse_fill_empty_rows_grad", &tsr::sparse_fill_empty_rows_grad_cuda);
}
