// CUDA's builtins by which threads work together: barriers, collectives of a warp, atomics.
//
// They have CUDA's names, types and results. A call that hardware refuses, or whose result is undefined, throws.
#pragma once
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "engine.h"

// ---- Barriers and fences --------------------------------------------------------------------------------------------

inline void __syncthreads(TSR_EMULATED_SITE) { tsr::emulated::barrier(false, {file, line}); }
inline int __syncthreads_count(int predicate, TSR_EMULATED_SITE) {
  return tsr::emulated::barrier(predicate != 0, {file, line}).set;
}
inline int __syncthreads_and(int predicate, TSR_EMULATED_SITE) {
  const tsr::emulated::Votes votes = tsr::emulated::barrier(predicate != 0, {file, line});
  return votes.set == votes.threads;
}
inline int __syncthreads_or(int predicate, TSR_EMULATED_SITE) {
  return tsr::emulated::barrier(predicate != 0, {file, line}).set != 0;
}
inline void __syncwarp(unsigned mask = ~0u, TSR_EMULATED_SITE) {
  tsr::emulated::collective(tsr::emulated::Collective::kSync, mask, 0, {file, line});
}
// All threads run in one host thread and see each other's writes at once: races.h alone finds a missing fence.
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) { tsr::emulated::switch_point(); }

// ---- Collectives of a warp ------------------------------------------------------------------------------------------

constexpr int warpSize = 32;

// Which lanes run at an instant is the hardware's choice: no result may depend on it.
inline unsigned __activemask() {
  throw std::logic_error("emulated CUDA: __activemask() has no defined result: say which lanes take part");
}

namespace tsr::emulated {

template <class T>
uint64_t bits_of(const T& value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T shuffle(unsigned mask, T value, int source, Site site) {
  const uint64_t bits = shuffle_bits(mask, bits_of(value), source, site);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Combines the values of all lanes that take part.
template <class T, class F>
T reduce(unsigned mask, T value, Site site, const F& combine) {
  const Lanes& lanes = collective(Collective::kReduce, mask, bits_of(value), site);
  bool first = true;
  T result{};
  for (int i = 0; i < 32; ++i) {
    if ((lanes.present >> i & 1) == 0) continue;
    const T next = static_cast<T>(lanes.values[i]);
    result = first ? next : static_cast<T>(combine(result, next));
    first = false;
  }
  return result;
}

}  // namespace tsr::emulated

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, TSR_EMULATED_SITE) {
  const int first = tsr::emulated::segment_start(width);
  return tsr::emulated::shuffle(mask, value, first + (source & (width - 1)), {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step, int width = 32, TSR_EMULATED_SITE) {
  const int lane = tsr::emulated::lane(), source = lane ^ step;
  const bool inside = source >= 0 && source < tsr::emulated::segment_start(width) + width;
  return tsr::emulated::shuffle(mask, value, inside ? source : lane, {file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned step, int width = 32, TSR_EMULATED_SITE) {
  const int lane = tsr::emulated::lane();
  const bool inside = step <= static_cast<unsigned>(lane - tsr::emulated::segment_start(width));
  return tsr::emulated::shuffle(mask, value, inside ? lane - static_cast<int>(step) : lane, {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned step, int width = 32, TSR_EMULATED_SITE) {
  const int lane = tsr::emulated::lane();
  const bool inside = step < static_cast<unsigned>(tsr::emulated::segment_start(width) + width - lane);
  return tsr::emulated::shuffle(mask, value, inside ? lane + static_cast<int>(step) : lane, {file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, TSR_EMULATED_SITE) {
  return tsr::emulated::vote(mask, predicate != 0, {file, line}).first;
}
inline int __any_sync(unsigned mask, int predicate, TSR_EMULATED_SITE) {
  return tsr::emulated::vote(mask, predicate != 0, {file, line}).first != 0;
}
inline int __all_sync(unsigned mask, int predicate, TSR_EMULATED_SITE) {
  const auto [set, present] = tsr::emulated::vote(mask, predicate != 0, {file, line});
  return set == present;
}

// The lanes with the asking lane's value.
template <class T>
unsigned __match_any_sync(unsigned mask, T value, TSR_EMULATED_SITE) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  return tsr::emulated::match(mask, tsr::emulated::bits_of(value), {file, line}).first;
}
// All lanes if they have the same value, else none.
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, TSR_EMULATED_SITE) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  const auto [same, present] = tsr::emulated::match(mask, tsr::emulated::bits_of(value), {file, line});
  *predicate = same == present;
  return *predicate ? same : 0;
}

#define TSR_REDUCE(name, T, expression)                                                           \
  inline T name(unsigned mask, T value, TSR_EMULATED_SITE) {                                      \
    return tsr::emulated::reduce(mask, value, {file, line}, [](T a, T b) { return expression; }); \
  }
TSR_REDUCE(__reduce_add_sync, unsigned, a + b)
TSR_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
TSR_REDUCE(__reduce_max_sync, unsigned, a < b ? b : a)
TSR_REDUCE(__reduce_add_sync, int, static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
TSR_REDUCE(__reduce_min_sync, int, a < b ? a : b)
TSR_REDUCE(__reduce_max_sync, int, a < b ? b : a)
TSR_REDUCE(__reduce_and_sync, unsigned, a& b)
TSR_REDUCE(__reduce_or_sync, unsigned, a | b)
TSR_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef TSR_REDUCE

// ---- Atomics, on global and shared memory ---------------------------------------------------------------------------

namespace tsr::emulated {

template <class T, class... Types>
constexpr bool is_one_of = (std::is_same_v<T, Types> || ...);

// Other threads may run just before and just after, never between.
template <class T, class F>
TSR_EMULATED_INLINE T atomic(T* address, const F& next) {
  check_alignment(address, sizeof(T));
  switch_point();
  T old;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  T value = static_cast<T>(next(old));
  __atomic_exchange(address, &value, &old, __ATOMIC_RELAXED);
  switch_point();
  return old;
}

}  // namespace tsr::emulated

// The operation, and the types for which hardware has it.
#define TSR_ATOMIC(name, expression, ...)                                                      \
  template <class T>                                                                           \
  TSR_EMULATED_INLINE T name(T* address, std::common_type_t<T> value) {                        \
    static_assert(tsr::emulated::is_one_of<T, __VA_ARGS__>);                                   \
    return tsr::emulated::atomic(address, [=]([[maybe_unused]] T old) { return expression; }); \
  }
TSR_ATOMIC(atomicAdd, old + value, int, unsigned, unsigned long long, float, double)
TSR_ATOMIC(atomicSub, old - value, int, unsigned)
TSR_ATOMIC(atomicMin, value < old ? value : old, int, unsigned, long long, unsigned long long)
TSR_ATOMIC(atomicMax, old < value ? value : old, int, unsigned, long long, unsigned long long)
TSR_ATOMIC(atomicAnd, old& value, int, unsigned, unsigned long long)
TSR_ATOMIC(atomicOr, old | value, int, unsigned, unsigned long long)
TSR_ATOMIC(atomicXor, old ^ value, int, unsigned, unsigned long long)
TSR_ATOMIC(atomicExch, value, int, unsigned, unsigned long long, float)
TSR_ATOMIC(atomicInc, old >= value ? 0 : old + 1, unsigned)
TSR_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1, unsigned)
#undef TSR_ATOMIC

template <class T>
TSR_EMULATED_INLINE T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  static_assert(tsr::emulated::is_one_of<T, int, unsigned, unsigned long long, unsigned short>);
  return tsr::emulated::atomic(address, [=](T old) { return old == expected ? value : old; });
}
