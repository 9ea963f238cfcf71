// unique by a hash table of positions: unique.cuh finds the firsts, which are flagged and numbered in the order of x
// without another look at the table.
#include "../cuda.h"
#include "../unique.h"
#include "device.cuh"
#include "primitives.cuh"
#include "unique.cuh"

namespace tsr {
namespace {

// f receives the unsigned type of `bytes` bytes: values are compared by their bits.
template <class F>
void dispatch_width(uint64_t bytes, const F& f) {
  switch (bytes) {
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

// Positions in fewer elements than this take 32 bits, half the bytes to move. Emulated, few elements reach both kinds.
#ifdef TSR_EMULATED
constexpr int64_t kNarrow = 2000;
#else
constexpr int64_t kNarrow = int64_t{1} << 31;
#endif

template <class F>
void dispatch_position(int64_t n, const F& f) {
  if (n < kNarrow) {
    f(type_tag<unsigned>{});
  } else {
    f(type_tag<unsigned long long>{});
  }
}

// ---- What a value is ------------------------------------------------------------------------------------------------

// Beside what unique.cuh asks of them, keys have
//   Result     what is written of each distinct value
//   result(i)  that of the value at position i

// Elements of a vector, compared by their bits.
template <class T>
struct ElementKeys {
  using Value = T;
  using Result = T;
  // Values of up to 16 bits have a slot each.
  static constexpr bool kDirect = sizeof(T) <= 2;

  const T* x;

  static uint64_t capacity(int64_t n) {
    return kDirect ? uint64_t{1} << (kDirect ? 8 * sizeof(T) : 0) : 2 * static_cast<uint64_t>(n);
  }
  __device__ T load(int64_t i) const { return x[i]; }
  __device__ T result(int64_t i) const { return x[i]; }
  __device__ uint64_t hash_of(T value) const {
    if constexpr (kDirect) {
      return static_cast<uint64_t>(value) << (64 - 8 * sizeof(T));
    } else {
      return scattered(value);
    }
  }
  __device__ bool equals(int64_t position, T value) const { return x[position] == value; }
};

// Rows of a matrix, compared unit by unit where their hashes agree.
template <class Unit>
struct RowKeys {
  struct Value {
    uint64_t hash;
    int64_t row;
  };
  using Result = int64_t;

  const Unit* x;
  int64_t units;           // of a row
  const uint64_t* hashes;  // [n]

  static uint64_t capacity(int64_t n) { return 2 * static_cast<uint64_t>(n); }
  __device__ Value load(int64_t i) const { return {hashes[i], i}; }
  __device__ int64_t result(int64_t i) const { return i; }
  __device__ uint64_t hash_of(const Value& value) const { return value.hash; }
  __device__ bool equals(int64_t position, const Value& value) const {
    if (hashes[position] != value.hash) return false;
    const Unit *mine = x + value.row * units, *other = x + position * units;
    int64_t u = 0;
    while (u < units && mine[u] == other[u]) ++u;
    return u == units;
  }
};

// hashes[i] = the sum of what each unit of row i scatters to at its place. A team takes a row, and adds in a tree.
template <class Unit>
__global__ void row_hashes_kernel(const Unit* x, int64_t rows, int64_t units, RowTiling tiling, uint64_t* hashes) {
  const int lanes = 1 << tiling.lanes_log2, lane = static_cast<int>(threadIdx.x) % lanes;
  for (int64_t i = tiling.first(); i < rows; i += tiling.stride()) {
    unsigned long long hash = 0;
    for (int64_t u = lane; u < units; u += lanes) {
      hash += scattered(x[i * units + u] ^ scattered(static_cast<uint64_t>(u) + 1));
    }
    for (int step = lanes / 2; step > 0; step /= 2) hash += __shfl_xor_sync(tiling.team_mask(), hash, step);
    if (lane == 0) hashes[i] = hash;
  }
}

template <class Unit>
RowKeys<Unit> row_keys(DeviceCall& call, const void* x, int64_t rows, int64_t row_bytes) {
  const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
  uint64_t* const hashes = call.workspace<uint64_t>(rows);
  const RowTiling tiling(rows, std::min<int64_t>(units, kWarp), 1);
  launch(call, tiling.shape(), row_hashes_kernel<Unit>, static_cast<const Unit*>(x), rows, units, tiling, hashes);
  return {static_cast<const Unit*>(x), units, hashes};
}

// ---- Numbers --------------------------------------------------------------------------------------------------------

// One warp flags 32 elements at a time: those without a parent.
template <class P>
__global__ void flag_firsts_kernel(const P* parents, int64_t n, uint32_t* firsts) {
  for (int64_t start = tile_index(); start - threadIdx.x < n; start += tile_stride()) {
    bool is_first[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      is_first[k] = i < n && parents[i] == kNone<P>;
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      const uint32_t flags = __ballot_sync(~0u, is_first[k]);
      if (i < n && i % kWarp == 0) firsts[i / kWarp] = flags;
    }
  }
}

// A value's number is the number of firsts before its own first.
struct Numbers {
  const uint32_t* firsts;  // [ceil(n / 32)] flags
  const int64_t* before;   // firsts before each word

  __device__ int64_t of_first(int64_t i) const {
    return before[i / kWarp] + __popc(firsts[i / kWarp] & ((1u << i % kWarp) - 1));
  }
};

// One thread follows kInFlight elements' parents to the first of each one's value.
template <class Keys, class P>
__global__ void write_unique_kernel(Keys keys, const P* parents, int64_t n, Numbers numbers,
                                    typename Keys::Result* results, int64_t* inverse) {
  for (int64_t start = tile_index(); start < n; start += tile_stride()) {
    P first[kInFlight], parent[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      first[k] = i < n ? static_cast<P>(i) : P{0};
      parent[k] = i < n ? parents[i] : kNone<P>;
    }
    for (bool walking = true; walking;) {
      walking = false;
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (parent[k] == kNone<P>) continue;
        first[k] = parent[k];
        parent[k] = parents[first[k]];
        walking = true;
      }
    }
    int64_t number[kInFlight];
    typename Keys::Result result[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      number[k] = numbers.of_first(static_cast<int64_t>(first[k]));
      if (first[k] == static_cast<P>(i)) result[k] = keys.result(i);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n) inverse[i] = number[k];
      if (first[k] == static_cast<P>(i)) results[number[k]] = result[k];
    }
  }
}

// Numbers that a block counts by itself: popular values appear early, so theirs are small.
constexpr int64_t kCounters = 1024;
// Blocks that count: enough to fill a device, few enough that adding their counters up costs nothing.
constexpr int64_t kCountingBlocks = 1024;

// counts[number] = elements of that number: integers, so the order does not matter. One thread counts kInFlight
// elements of a tile.
__global__ void count_kernel(const int64_t* inverse, int64_t n, unsigned long long* counts) {
  TSR_SHARED(unsigned, counters, kCounters);
  for (int64_t c = threadIdx.x; c < kCounters; c += kThreads) counters[c] = 0;
  __syncthreads();
  for (int64_t start = tile_index(); start < n; start += tile_stride()) {
    int64_t number[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      number[k] = i < n ? inverse[i] : -1;
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (number[k] >= kCounters) {
        atomicAdd(&counts[number[k]], 1ull);
      } else if (number[k] >= 0) {
        atomicAdd(&counters[number[k]], 1u);
      }
    }
  }
  __syncthreads();
  for (int64_t c = threadIdx.x; c < kCounters; c += kThreads) {
    if (counters[c] != 0) atomicAdd(&counts[c], static_cast<unsigned long long>(counters[c]));
  }
}

// ---- Operators ------------------------------------------------------------------------------------------------------

struct Unique {
  Tensor results, inverse, counts;
};

template <class P, class Keys>
Unique unique_of(DeviceCall& call, const Keys& keys, int64_t n, ScalarType result_dtype, bool with_counts) {
  const int64_t words = (n + kWarp - 1) / kWarp;
  const P* const parents = find_parents<P>(call, keys, n);
  uint32_t* const firsts = call.workspace<uint32_t>(words + 1);
  int64_t* const before = call.workspace<int64_t>(words + 1);

  launch(call, one_block_each_tile(n), flag_firsts_kernel<P>, parents, n, firsts);
  count_bits_before(call, firsts, words, before);
  const int64_t distinct = call.read_back(before + words, "the number of distinct values");

  const Tensor inverse = call.empty({n}, ScalarType::Long);
  Unique result{call.empty({distinct}, result_dtype), inverse, inverse};
  int64_t* const numbers = static_cast<int64_t*>(inverse.data_ptr());
  launch(call, one_block_each_tile(n), write_unique_kernel<Keys, P>, keys, parents, n, Numbers{firsts, before},
         static_cast<typename Keys::Result*>(result.results.data_ptr()), numbers);
  if (with_counts) {
    result.counts = call.empty({distinct}, ScalarType::Long);
    unsigned long long* const counts = static_cast<unsigned long long*>(result.counts.data_ptr());
    fill_bytes(call.stream(), counts, 0, static_cast<size_t>(distinct) * sizeof(*counts));
    launch(call, {std::min(one_block_each_tile(n).blocks, kCountingBlocks)}, count_kernel, numbers, n, counts);
  }
  return result;
}

template <class Keys>
Unique unique_of(DeviceCall& call, const Keys& keys, int64_t n, ScalarType result_dtype, bool with_counts) {
  std::optional<Unique> result;
  dispatch_position(
      n, [&](auto tag) { result = unique_of<typename decltype(tag)::type>(call, keys, n, result_dtype, with_counts); });
  return *result;
}

Unique unique_elements(DeviceCall& call, const Tensor& x, bool with_counts) {
  std::optional<Unique> result;
  dispatch_width(x.element_size(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    result = unique_of(call, ElementKeys<T>{call.data<T>(x)}, x.size(0), x.scalar_type(), with_counts);
  });
  return *result;
}

std::tuple<Tensor, Tensor> unique_cuda(const Tensor& x) {
  const char* op = "unique";
  check_unique(op, x);
  DeviceCall call(op, x);
  const Unique result = unique_elements(call, x, /*with_counts=*/false);
  return {result.results, result.inverse};
}

std::tuple<Tensor, Tensor, Tensor> unique_with_counts_cuda(const Tensor& x) {
  const char* op = "unique_with_counts";
  check_unique(op, x);
  DeviceCall call(op, x);
  const Unique result = unique_elements(call, x, /*with_counts=*/true);
  return {result.results, result.inverse, result.counts};
}

std::tuple<Tensor, Tensor, Tensor> unique_rows_cuda(const Tensor& x) {
  check_unique_rows(x);
  DeviceCall call("unique_rows", x);
  const void* const data = call.data(x);
  const int64_t n = x.size(0), row_bytes = row_elements(x) * static_cast<int64_t>(x.element_size());
  // The largest unit that divides a row and the address.
  uint64_t unit = 8;
  while ((static_cast<uint64_t>(row_bytes) | reinterpret_cast<uintptr_t>(data)) % unit != 0) unit /= 2;
  std::optional<Unique> result;
  dispatch_width(unit, [&](auto tag) {
    const auto keys = row_keys<typename decltype(tag)::type>(call, data, n, row_bytes);
    result = unique_of(call, keys, n, ScalarType::Long, /*with_counts=*/true);
  });
  return {result->results, result->inverse, result->counts};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "unique", &tsr::unique_cuda);
  TSR_IMPL(m, "unique_with_counts", &tsr::unique_with_counts_cuda);
  TSR_IMPL(m, "unique_rows", &tsr::unique_rows_cuda);
}
