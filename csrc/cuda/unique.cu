// unique by a hash table of positions.
//
// A slot of the table holds the earliest position known of one value; the values themselves are looked up in x. Who
// finds an earlier position of its value in the slot has it for a parent; who puts a later one out of the slot becomes
// that one's parent. Which parents there are depends on the order of the threads, but a parent is always an earlier
// position of the same value, and the one position without a parent is the value's first. So firsts are flagged and
// numbered in the order of x without another look at the table.
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

// Values of up to 16 bits have a slot each.
template <class T>
constexpr bool is_direct = sizeof(T) <= 2;

// In an empty slot and as the parent of firsts. No entry is all ones: a position leaves one of its bits 0.
template <class P>
constexpr P kNone = static_cast<P>(~P{0});

// Open addressing. The low bits of a slot are a position; above them there is room for up to 8 bits of the value's
// hash, by which different values are told apart without a look at x.
template <class T, class P>
struct Positions {
  const T* x;
  P* slots;    // [capacity]
  P* parents;  // [n]
  uint64_t capacity;
  int position_bits;

  // Slots in a row that are tried before the hash is scattered anew: values made to collide part there.
  static constexpr int kRow = 32;

  Positions(const T* values, int64_t n) : x(values), slots(nullptr), parents(nullptr), position_bits(1) {
    if constexpr (is_direct<T>) {
      capacity = uint64_t{1} << 8 * sizeof(T);
    } else {
      capacity = 2 * static_cast<uint64_t>(n);
    }
    while (n >> position_bits != 0) ++position_bits;
  }

  __device__ uint64_t hash_of(T value) const {
    if constexpr (is_direct<T>) {
      return static_cast<uint64_t>(value) << (64 - 8 * sizeof(T));
    } else {
      return scattered(value);
    }
  }
  __device__ uint64_t slot_of(uint64_t hash) const { return __umul64hi(hash, capacity); }
  __device__ P entry_of(uint64_t hash, int64_t position) const {
    return static_cast<P>(hash & 0xff) << position_bits | static_cast<P>(position);
  }
  __device__ P position_of(P entry) const { return entry & ((P{1} << position_bits) - 1); }
  __device__ bool same_value(P entry, P mine, T value) const {
    return (entry ^ mine) >> position_bits == 0 && x[position_of(entry)] == value;
  }

  // What the slot holds, which may be out of date: a later position of the same value. An empty slot takes the entry.
  __device__ P look(uint64_t slot, P entry) const {
    const P found = slots[slot];
    return found == kNone<P> ? atomicCAS(&slots[slot], kNone<P>, entry) : found;
  }

  // Goes on where the hash's own slot is not empty but holds `found`.
  __device__ void settle(T value, uint64_t hash, int64_t position, P found) const {
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
template <class T, class P>
__global__ void enter_kernel(Positions<T, P> table, int64_t begin, int64_t n) {
  for (int64_t start = begin + tile_index(); start < n; start += tile_stride()) {
    T values[kInFlight];
    P found[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n) values[k] = table.x[i];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n) found[k] = table.slots[table.slot_of(table.hash_of(values[k]))];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      const uint64_t hash = table.hash_of(values[k]);
      if (i < n && found[k] == kNone<P>) {
        found[k] = atomicCAS(&table.slots[table.slot_of(hash)], kNone<P>, table.entry_of(hash, i));
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n && found[k] != kNone<P>) table.settle(values[k], table.hash_of(values[k]), i, found[k]);
    }
  }
}

// The first tile goes ahead: it puts popular values in the table, so that the many threads that start together next
// find them by a load and do not all fight for one empty slot.
template <class T, class P>
void enter(DeviceCall& call, const Positions<T, P>& table, int64_t n) {
  const int64_t ahead = std::min(n, kTile);
  launch(call, one_block_each_tile(ahead), enter_kernel<T, P>, table, int64_t{0}, ahead);
  launch(call, one_block_each_tile(n - ahead), enter_kernel<T, P>, table, ahead, n);
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
template <class T, class P>
__global__ void write_unique_kernel(const T* x, const P* parents, int64_t n, Numbers numbers, T* values,
                                    int64_t* inverse) {
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
    T value[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      number[k] = numbers.of_first(static_cast<int64_t>(first[k]));
      if (first[k] == static_cast<P>(i)) value[k] = x[i];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < n) inverse[i] = number[k];
      if (first[k] == static_cast<P>(i)) values[number[k]] = value[k];
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
  Tensor values, inverse, counts;
};

template <class T, class P>
Unique unique_of(DeviceCall& call, const Tensor& x, bool with_counts) {
  const int64_t n = x.size(0), words = (n + kWarp - 1) / kWarp;
  Positions<T, P> table(call.data<T>(x), n);
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

  Unique result{call.empty({distinct}, x.scalar_type()), call.empty({n}, ScalarType::Long), x};
  int64_t* const inverse = static_cast<int64_t*>(result.inverse.data_ptr());
  launch(call, one_block_each_tile(n), write_unique_kernel<T, P>, table.x, table.parents, n, Numbers{firsts, before},
         static_cast<T*>(result.values.data_ptr()), inverse);
  if (with_counts) {
    result.counts = call.empty({distinct}, ScalarType::Long);
    unsigned long long* const counts = static_cast<unsigned long long*>(result.counts.data_ptr());
    fill_bytes(call.stream(), counts, 0, static_cast<size_t>(distinct) * sizeof(*counts));
    launch(call, {std::min(one_block_each_tile(n).blocks, kCountingBlocks)}, count_kernel, inverse, n, counts);
  }
  return result;
}

Unique unique_of(DeviceCall& call, const Tensor& x, bool with_counts) {
  Unique result{x, x, x};
  dispatch_width(x, [&](auto value_tag) {
    dispatch_position(x.size(0), [&](auto position_tag) {
      result =
          unique_of<typename decltype(value_tag)::type, typename decltype(position_tag)::type>(call, x, with_counts);
    });
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
