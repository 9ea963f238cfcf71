// unique by a hash table of positions.
//
// A slot of the table holds the earliest position known of one value; the values themselves are looked up in x. A
// position that finds an earlier one of its value in the slot has that for a parent; one that puts a later one out of
// the slot becomes that one's parent. Which parents there are depends on the order of the threads, but a parent is
// always an earlier position of the same value, and the one position without a parent is the value's first. So firsts
// are flagged and numbered in the order of x without another look at the table.
//
// What a value is, the table's Keys say: an element of a vector, or a row of a matrix.
#include "../cuda.h"
#include "../unique.h"
#include "atomics.cuh"
#include "device.cuh"
#include "primitives.cuh"

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

// ---- The table ------------------------------------------------------------------------------------------------------

// A bijection that spreads nearby values.
__device__ inline uint64_t scattered(uint64_t value) {
  uint64_t hash = value * 0x9e3779b97f4a7c15;
  hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93;
  return hash ^ hash >> 32;
}

// Keys have
//   Value                    what is held of a value while it is entered
//   Result                   what is written of each distinct value
//   capacity(n)              the slots of a table for n values
//   load(i), result(i)       the value at position i, and its result
//   hash_of(value)           whose upper bits choose the slot
//   equals(position, value)  whether x holds the value there

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

// In an empty slot and as the parent of firsts. No entry is all ones: a position leaves one of its bits 0.
template <class P>
constexpr P kNone = static_cast<P>(~P{0});

// Open addressing. The low bits of a slot are a position; above them there is room for up to 8 bits of the value's
// hash, by which different values are told apart without a look at x.
template <class Keys, class P>
struct Positions {
  using Value = typename Keys::Value;

  Keys keys;
  P* slots;    // [capacity]
  P* parents;  // [n]
  uint64_t capacity;
  int position_bits;

  // Slots in a row that are tried before the hash is scattered anew: values made to collide part there.
  static constexpr int kRow = 32;

  Positions(const Keys& keys_, int64_t n)
      : keys(keys_), slots(nullptr), parents(nullptr), capacity(Keys::capacity(n)), position_bits(1) {
    while (n >> position_bits != 0) ++position_bits;
  }

  __device__ uint64_t slot_of(uint64_t hash) const { return __umul64hi(hash, capacity); }
  __device__ P entry_of(uint64_t hash, int64_t position) const {
    return static_cast<P>(hash & 0xff) << position_bits | static_cast<P>(position);
  }
  __device__ P position_of(P entry) const { return entry & ((P{1} << position_bits) - 1); }
  __device__ bool same_value(P entry, P mine, const Value& value) const {
    return (entry ^ mine) >> position_bits == 0 && keys.equals(static_cast<int64_t>(position_of(entry)), value);
  }

  // What the slot holds, which may be out of date: a later position of the same value. An empty slot takes the entry.
  __device__ P look(uint64_t slot, P entry) const {
    const P found = relaxed_load(&slots[slot]);
    return found == kNone<P> ? atomicCAS(&slots[slot], kNone<P>, entry) : found;
  }

  // Goes on where the hash's own slot is not empty but holds `found`.
  __device__ void settle(const Value& value, uint64_t hash, int64_t position, P found) const {
    const P entry = entry_of(hash, position);
    uint64_t slot = slot_of(hash);
    for (int step = 1; !same_value(found, entry, value); ++step) {
      if (step % kRow == 0) {
        hash = scattered(hash + static_cast<uint64_t>(step));  // the step: 0 would stay where it is
        slot = slot_of(hash);
      } else {
        slot = slot + 1 == capacity ? 0 : slot + 1;
      }
      found = look(slot, entry);
      if (found == kNone<P>) return;
    }
    if (found > entry) found = atomicMin(&slots[slot], entry);
    if (found > entry) {
      parents[position_of(found)] = static_cast<P>(position);
    } else {
      parents[position] = position_of(found);
    }
  }
};

// Elements that a thread has in flight: the slots lie anywhere in memory.
constexpr int kInFlight = 4;
constexpr int64_t kTile = kInFlight * kThreads;

LaunchShape one_block_each_tile(int64_t n) { return {std::min(n / kTile + (n % kTile != 0), kMaxBlocks)}; }

// Tiles of a block: for (int64_t i = tile_index(); ...; i += tile_stride()), whose elements are kThreads apart.
__device__ inline int64_t tile_index() { return static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x; }
__device__ inline int64_t tile_stride() { return static_cast<int64_t>(gridDim.x) * kTile; }

// Enters x[begin : n]. One thread enters kInFlight elements of a tile.
template <class Keys, class P>
__global__ void enter_kernel(Positions<Keys, P> table, int64_t begin, int64_t n) {
  for (int64_t start = begin + tile_index(); start < n; start += tile_stride()) {
    typename Keys::Value values[kInFlight];
    P found[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n) values[k] = table.keys.load(i);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n) found[k] = relaxed_load(&table.slots[table.slot_of(table.keys.hash_of(values[k]))]);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      const uint64_t hash = table.keys.hash_of(values[k]);
      if (i < n && found[k] == kNone<P>) {
        found[k] = atomicCAS(&table.slots[table.slot_of(hash)], kNone<P>, table.entry_of(hash, i));
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n && found[k] != kNone<P>) table.settle(values[k], table.keys.hash_of(values[k]), i, found[k]);
    }
  }
}

// The first tile goes ahead: it puts popular values in the table, so that the many threads that start together next
// find them by a load and do not all fight for one empty slot.
template <class Keys, class P>
void enter(DeviceCall& call, const Positions<Keys, P>& table, int64_t n) {
  const int64_t ahead = std::min(n, kTile);
  launch(call, one_block_each_tile(ahead), enter_kernel<Keys, P>, table, int64_t{0}, ahead);
  launch(call, one_block_each_tile(n - ahead), enter_kernel<Keys, P>, table, ahead, n);
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
  Positions<Keys, P> table(keys, n);
  const int64_t capacity = static_cast<int64_t>(table.capacity);
  table.slots = call.workspace<P>(capacity + n);
  table.parents = table.slots + capacity;
  uint32_t* const firsts = call.workspace<uint32_t>(words + 1);
  int64_t* const before = call.workspace<int64_t>(words + 1);

  fill_bytes(call.stream(), table.slots, 0xff, static_cast<size_t>(capacity + n) * sizeof(P));
  enter(call, table, n);
  launch(call, one_block_each_tile(n), flag_firsts_kernel<P>, table.parents, n, firsts);
  count_bits_before(call, firsts, words, before);
  const int64_t distinct = call.read_back(before + words, "the number of distinct values");

  const Tensor inverse = call.empty({n}, ScalarType::Long);
  Unique result{call.empty({distinct}, result_dtype), inverse, inverse};
  int64_t* const numbers = static_cast<int64_t*>(inverse.data_ptr());
  launch(call, one_block_each_tile(n), write_unique_kernel<Keys, P>, keys, table.parents, n, Numbers{firsts, before},
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
