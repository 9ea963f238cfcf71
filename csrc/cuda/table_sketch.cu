// count_min_sketch_: the counting Bloom filter.
//
// Adding and reading are kernels of their own: all ids of a call count before any is read. Sums of integers do not
// depend on the order of threads, nor do they where each stops at the most.
#include "table.cuh"

namespace tsr {
namespace {

// Counters of 32 and 64 bits: while ids are counted they are unsigned and may pass the most. Who sees that one has
// leaves it alone, so none is passed by more than the running threads add; reading takes them back.
template <class C>
struct WideCounters {
  using Word = std::conditional_t<sizeof(C) == 4, unsigned, unsigned long long>;
  static constexpr Word kMost = static_cast<Word>(std::numeric_limits<C>::max());

  Word* counters;
  int64_t width;

  WideCounters(DeviceCall&, void* data, int64_t width_) : counters(static_cast<Word*>(data)), width(width_) {}

  __device__ void add(int64_t c, unsigned times) const {
    if (relaxed_load(&counters[c]) < kMost) atomicAdd(&counters[c], static_cast<Word>(times));
  }
  __device__ int64_t read(int64_t c) const {
    const Word known = relaxed_load(&counters[c]);
    if (known > kMost) relaxed_store(&counters[c], kMost);
    return static_cast<int64_t>(min(known, kMost));
  }
};

// Counters of 8 and 16 bits, in words of 16: there are atomics of no fewer. A counter of 8 bits at either end, the
// other half of whose word is not the sketch's, is added to in a number of its own.
template <class C>
struct NarrowCounters {
  static constexpr unsigned kMost = static_cast<unsigned>(std::numeric_limits<C>::max());
  static constexpr bool kInHalves = sizeof(C) == 1;

  C* counters;
  int64_t width;
  unsigned* alone;  // [2]: what is added to the first counter and to the last, where they are alone

  NarrowCounters(DeviceCall& call, void* data, int64_t width_)
      : counters(static_cast<C*>(data)), width(width_), alone(call.workspace<unsigned>(2)) {
    fill_bytes(call.stream(), alone, 0, 2 * sizeof(*alone));
  }

  __device__ void add(int64_t c, unsigned times) const {
    const bool is_upper = kInHalves && reinterpret_cast<uintptr_t>(counters + c) % 2 != 0;
    if (kInHalves && (is_upper ? c == 0 : c + 1 == width)) {
      unsigned* const sum = &alone[c == 0 ? 0 : 1];
      if (relaxed_load(sum) < kMost) atomicAdd(sum, times);
      return;
    }
    unsigned short* const word = reinterpret_cast<unsigned short*>(counters + c - is_upper);
    const int shift = is_upper ? 8 : 0;
    for (unsigned short known = relaxed_load(word);;) {
      const unsigned value = static_cast<unsigned>(known) >> shift & (2 * kMost + 1);
      if (value >= kMost) return;
      const unsigned more = min(times, kMost - value) << shift;
      const unsigned short found = atomicCAS(word, known, static_cast<unsigned short>(known + more));
      if (found == known) return;
      known = found;
    }
  }
  __device__ int64_t read(int64_t c) const { return counters[c]; }
};

// One thread for either end.
template <class C>
__global__ void add_alone_kernel(NarrowCounters<C> sketch) {
  C& counter = sketch.counters[threadIdx.x == 0 ? 0 : sketch.width - 1];
  const unsigned added = sketch.alone[threadIdx.x];
  if (added != 0) counter = static_cast<C>(min(static_cast<unsigned>(counter) + added, sketch.kMost));
}

// One thread per id: of a warp's lanes with one id the lowest counts for all.
template <class Sketch>
__global__ void count_kernel(Sketch sketch, Keys ids, int64_t n, const bool* mask, int64_t num_hashes) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int64_t start = thread_index() - lane; start < n; start += thread_count()) {
    const int64_t i = start + lane;
    const bool counts = i < n && (mask == nullptr || mask[i]);
    const unsigned counting = __ballot_sync(~0u, counts);
    if (!counts) continue;
    const int64_t key = ids[i];
    const unsigned same = __match_any_sync(counting, static_cast<unsigned long long>(key));
    if (__ffs(static_cast<int>(same)) - 1 != lane) continue;
    const SketchPlace place(key);
    for (int64_t k = 0; k < num_hashes; ++k) {
      sketch.add(place.counter(k, sketch.width), static_cast<unsigned>(__popc(same)));
    }
  }
}

// One thread per id.
template <class Sketch>
__global__ void read_kernel(Sketch sketch, Keys ids, int64_t n, const bool* mask, int64_t num_hashes, int32_t* counts) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    int64_t least = 0;
    if (mask == nullptr || mask[i]) {
      least = INT32_MAX;
      const SketchPlace place(ids[i]);
      for (int64_t k = 0; k < num_hashes; ++k) least = min(least, sketch.read(place.counter(k, sketch.width)));
    }
    counts[i] = static_cast<int32_t>(least);
  }
}

Tensor count_min_sketch_cuda(const Tensor& sketch, const Tensor& ids, const std::optional<Tensor>& mask,
                             int64_t num_hashes, bool count) {
  check_count_min_sketch(sketch, ids, mask, num_hashes);
  DeviceCall call("count_min_sketch_", ids);
  const int64_t n = ids.size(0);
  const Keys keys = keys_of(call, ids);
  const bool* const wanted = mask ? call.data<bool>(*mask) : nullptr;
  const Tensor counts = call.empty({n}, ScalarType::Int);
  dispatch_counter(sketch, [&](auto tag) {
    using C = typename decltype(tag)::type;
    using Sketch = std::conditional_t<(sizeof(C) >= 4), WideCounters<C>, NarrowCounters<C>>;
    const Sketch counters(call, sketch.data_ptr(), sketch.size(0));
    if (count) {
      launch(call, one_thread_each(n), count_kernel<Sketch>, counters, keys, n, wanted, num_hashes);
      if constexpr (sizeof(C) == 1) launch(call, {1, 2}, add_alone_kernel<C>, counters);
    }
    launch(call, one_thread_each(n), read_kernel<Sketch>, counters, keys, n, wanted, num_hashes,
           static_cast<int32_t*>(counts.data_ptr()));
  });
  return counts;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) { TSR_IMPL(m, "count_min_sketch_", &tsr::count_min_sketch_cuda); }
