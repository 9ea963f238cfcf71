// Every builtin of arithmetic.h and collectives.h, on 32 threads; the test computes the same in Python.
#include "faults.h"

namespace tsr {
namespace {

using U64 = unsigned long long;

// The extremes, then numbers without a pattern.
U64 number(unsigned i) {
  constexpr U64 extremes[] = {0, ~0ull, 1ull << 63, 1, ~0ull >> 1, 1ull << 31, 0xffffffffull, 1ull << 32};
  return i < 8 ? extremes[i] : i * 0x9e3779b97f4a7c15ull;
}

// out[t] = f(x, y, t), where x and y differ from thread to thread.
template <class F>
__global__ void map_kernel(U64* out, F f) {
  out[threadIdx.x] = static_cast<U64>(f(number(threadIdx.x), number((threadIdx.x * 5 + 8) % 64), threadIdx.x));
}

template <class F>
std::function<void(Bench&)> map(const F& f) {
  return [f](Bench& b) { launch(b.call, {1, 32}, map_kernel<F>, b.out_as<U64>(), f); };
}

unsigned low(U64 x) { return static_cast<unsigned>(x); }
unsigned high(U64 x) { return static_cast<unsigned>(x >> 32); }
float as_float(U64 x) { return __uint_as_float(low(x) & 0xbfffffffu); }  // no NaN, no infinity
U64 bits(float x) { return __float_as_uint(x); }
U64 bits(double x) { return static_cast<U64>(__double_as_longlong(x)); }

const Cases& arithmetic_cases() {
  static const Cases all{
      {"umulhi", map([](U64 x, U64 y, unsigned) { return __umulhi(high(x), high(y)); })},
      {"mulhi", map([](U64 x, U64 y, unsigned) { return low(__mulhi(int(high(x)), int(high(y)))); })},
      {"umul64hi", map([](U64 x, U64 y, unsigned) { return __umul64hi(x, y); })},
      {"mul64hi", map([](U64 x, U64 y, unsigned) { return __mul64hi((long long)x, (long long)y); })},
      {"popc", map([](U64 x, U64, unsigned) { return __popc(high(x)); })},
      {"popcll", map([](U64 x, U64, unsigned) { return __popcll(x); })},
      {"clz", map([](U64 x, U64, unsigned) { return __clz(int(low(x))); })},
      {"clzll", map([](U64 x, U64, unsigned) { return __clzll((long long)x); })},
      {"ffs", map([](U64 x, U64, unsigned) { return __ffs(int(high(x))); })},
      {"ffsll", map([](U64 x, U64, unsigned) { return __ffsll((long long)x); })},
      {"brev", map([](U64 x, U64, unsigned) { return __brev(high(x)); })},
      {"brevll", map([](U64 x, U64, unsigned) { return __brevll(x); })},
      {"funnelshift_l", map([](U64 x, U64, unsigned t) { return __funnelshift_l(low(x), high(x), 3 * t); })},
      {"funnelshift_r", map([](U64 x, U64, unsigned t) { return __funnelshift_r(low(x), high(x), 3 * t); })},
      {"funnelshift_lc", map([](U64 x, U64, unsigned t) { return __funnelshift_lc(low(x), high(x), 3 * t); })},
      {"funnelshift_rc", map([](U64 x, U64, unsigned t) { return __funnelshift_rc(low(x), high(x), 3 * t); })},
      {"byte_perm", map([](U64 x, U64 y, unsigned) { return __byte_perm(low(x), high(x), low(y)); })},
      {"min_int", map([](U64 x, U64 y, unsigned) { return low(min(int(low(x)), int(low(y)))); })},
      {"max_mixed", map([](U64 x, U64 y, unsigned) { return max(int(low(x)), low(y)); })},  // as unsigned
      {"max_long", map([](U64 x, U64 y, unsigned) { return max((long long)x, (long long)y); })},
      {"max_float", map([](U64 x, U64 y, unsigned t) {
         return bits(max(t % 2 ? __uint_as_float(0x7fc00000u) : as_float(x), as_float(y)));
       })},
      {"min_float", map([](U64 x, U64 y, unsigned t) {
         return bits(min(as_float(x), t % 2 ? __int_as_float(0x7fc00000) : as_float(y)));
       })},
      {"fadd_rn", map([](U64 x, U64 y, unsigned) { return bits(__fadd_rn(as_float(x), as_float(y))); })},
      {"fmul_rn", map([](U64 x, U64 y, unsigned) { return bits(__fmul_rn(as_float(x), as_float(y))); })},
      {"fdiv_rn", map([](U64 x, U64, unsigned t) { return bits(__fdiv_rn(as_float(x), float(t + 3))); })},
      {"fsqrt_rn", map([](U64, U64, unsigned t) { return bits(__fsqrt_rn(float(t))); })},
      {"fmaf_rn", map([](U64, U64, unsigned t) { return bits(__fmaf_rn(1 + 0x1p-23f * t, 1 + 0x1p-23f * t, -1)); })},
      {"dadd_rn", map([](U64, U64, unsigned t) { return bits(__dadd_rn(0.1 * t, 1e17)); })},
      {"dmul_rn", map([](U64, U64, unsigned t) { return bits(__dmul_rn(0.1, t)); })},
      {"ddiv_rn", map([](U64, U64, unsigned t) { return bits(__ddiv_rn(t, 7)); })},
      {"dsqrt_rn", map([](U64, U64, unsigned t) { return bits(__dsqrt_rn(t)); })},
      {"fma_rn", map([](U64, U64, unsigned t) { return bits(__fma_rn(1 + 0x1p-52 * t, 1 + 0x1p-52 * t, -1)); })},
      {"double_bits",
       map([](U64 x, U64, unsigned) { return bits(__longlong_as_double((long long)(x & ~(3ull << 61)))); })},
      {"float_bits", map([](U64 x, U64, unsigned) { return U64(__float_as_int(as_float(x))) & 0xffffffff; })},
  };
  return all;
}

// ---- Loads and stores -----------------------------------------------------------------------------------------------

// Copies 16 numbers of 32 bits through every load and store; the sum shows that none is missing.
__global__ void copy_kernel(const float* from, float* to) {
  const unsigned t = threadIdx.x;
  const float4 four = __ldg(reinterpret_cast<const float4*>(from) + t);
  __stcs(reinterpret_cast<float4*>(to) + t, four);
  const uint2 two = __ldcs(reinterpret_cast<const uint2*>(from + 32) + t);
  __stcg(reinterpret_cast<uint2*>(to + 32) + t, two);
  __stwt(to + 48 + t, __ldcg(from + 48 + t) + __ldca(from + t) - __ldlu(from + t));
  __stwb(reinterpret_cast<int*>(to) + 56 + t, __ldcv(reinterpret_cast<const int*>(from) + 56 + t));
}

void copy(Bench& b) {
  float* const from = b.call.workspace<float>(64);
  for (int i = 0; i < 64; ++i) from[i] = static_cast<float>(i);
  launch(b.call, {1, 8}, copy_kernel, static_cast<const float*>(from), b.out);
}

__global__ void misaligned_kernel(const float* from, float* to) {
  *to = __ldg(reinterpret_cast<const float4*>(from + 1)).x;
}
__global__ void misaligned_atomic_kernel(uint8_t* count) { atomicAdd(reinterpret_cast<unsigned*>(count + 2), 1u); }

// ---- Threads together -----------------------------------------------------------------------------------------------

// Runs on `threads` threads: thread t votes t % 3 != 0, and the last thread returns at once.
__global__ void block_votes_kernel(int* out, int threads) {
  const int t = static_cast<int>(threadIdx.x);
  if (t == threads - 1) return;
  const int count = __syncthreads_count(t % 3);
  const int all = __syncthreads_and(t % 3) + 2 * __syncthreads_and(t < threads - 1);
  const int any = __syncthreads_or(t % 3) + 2 * __syncthreads_or(t > threads);
  if (t == 0) out[0] = count, out[1] = all, out[2] = any;
}

const Cases& collective_cases() {
  static const Cases all{
      {"match_any", map([](U64, U64, unsigned t) { return __match_any_sync(~0u, t % 5 == 1 ? 0 : int(t) % 3); })},
      {"match_any_64", map([](U64, U64, unsigned t) { return __match_any_sync(~0u, U64{t % 4} << 40); })},
      {"match_any_half", map([](U64, U64, unsigned t) {
         return t % 2 ? __match_any_sync(0xaaaaaaaau, t / 4) : __match_any_sync(0x55555555u, t / 8);
       })},
      {"match_all", map([](U64, U64, unsigned t) {
         int same = 7, other = 7;
         const unsigned first = __match_all_sync(~0u, 3, &same);
         return (first == ~0u) + 2 * same + 4 * (__match_all_sync(~0u, int(t == 9), &other) != 0) + 8 * other;
       })},
      {"reduce_add", map([](U64 x, U64, unsigned) { return __reduce_add_sync(~0u, high(x)); })},
      {"reduce_add_int", map([](U64 x, U64, unsigned) { return low(__reduce_add_sync(~0u, int(high(x)))); })},
      {"reduce_min", map([](U64, U64 y, unsigned) { return __reduce_min_sync(~0u, high(y)); })},
      {"reduce_min_int", map([](U64 x, U64, unsigned) { return low(__reduce_min_sync(~0u, int(high(x)))); })},
      {"reduce_max", map([](U64 x, U64, unsigned) { return __reduce_max_sync(~0u, low(x)); })},
      {"reduce_max_int", map([](U64 x, U64, unsigned) { return low(__reduce_max_sync(~0u, int(low(x)))); })},
      {"reduce_and", map([](U64 x, U64, unsigned) { return __reduce_and_sync(~0u, high(x) | 0xf0f); })},
      {"reduce_or", map([](U64, U64, unsigned t) { return __reduce_or_sync(~0u, (t % 3) << 4); })},
      {"reduce_xor", map([](U64 x, U64, unsigned) { return __reduce_xor_sync(~0u, high(x)); })},
      {"reduce_quarter", map([](U64, U64, unsigned t) { return __reduce_add_sync(0xffu << (t & ~7u), t); })},
      {"shuffle_8", map([](U64, U64, unsigned t) { return __shfl_sync(~0u, t, int(t) + 3, 8); })},
      {"shuffle_up_8", map([](U64, U64, unsigned t) { return __shfl_up_sync(~0u, t, 3, 8); })},
      {"shuffle_down_8", map([](U64, U64, unsigned t) { return __shfl_down_sync(~0u, t, 3, 8); })},
      {"shuffle_xor_8", map([](U64, U64, unsigned t) { return __shfl_xor_sync(~0u, t, t < 16 ? 4 : 8, 8); })},
      {"shuffle_double", map([](U64 x, U64, unsigned t) { return __shfl_sync(~0u, x ^ t, int(t) * 7 % 32); })},
      {"shuffle_half", map([](U64, U64, unsigned t) {
         const Half half = __shfl_sync(~0u, Half(static_cast<float>(t)), 31 - int(t));
         const BFloat16 brain = __shfl_sync(~0u, BFloat16(static_cast<float>(t)), 31 - int(t));
         return static_cast<float>(half) + 100 * static_cast<float>(brain);
       })},
      {"ballot_odd", map([](U64, U64, unsigned t) {
         return t % 2 ? __ballot_sync(0xaaaaaaaau, t < 9) : 1 + __all_sync(0x55555555u, t < 40);
       })},
      {"block_votes", [](Bench& b) { launch(b.call, {1, 41}, block_votes_kernel, b.out_as<int>(), 41); }},
      {"activemask", map([](U64, U64, unsigned) { return __activemask(); })},
      {"shuffle_among_12", map([](U64, U64, unsigned t) { return __shfl_sync(~0u, t, 0, 12); })},
      {"copy", copy},
      {"misaligned_load",
       [](Bench& b) { launch(b.call, {1, 1}, misaligned_kernel, static_cast<const float*>(b.out), b.out + 32); }},
      {"misaligned_atomic", [](Bench& b) { launch(b.call, {1, 1}, misaligned_atomic_kernel, b.out_as<uint8_t>()); }},
  };
  return all;
}

// ---- Atomics --------------------------------------------------------------------------------------------------------

// Every thread of two blocks does the same to out[0] and to shared memory of its block, which the block's first thread
// then adds to out[1] or compares with it.
template <class T, class F>
__global__ void atomic_kernel(T* out, T start, F f) {
  TSR_SHARED(T, values, 1);
  if (threadIdx.x == 0) values[0] = start;
  __syncthreads();
  f(&out[0], threadIdx.x);
  f(&values[0], threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) out[1 + blockIdx.x] = values[0];
}

template <class T, class F>
std::function<void(Bench&)> atomically(T start, const F& f) {
  return [=](Bench& b) {
    b.out_as<T>()[0] = start;
    launch(b.call, {2, 40}, atomic_kernel<T, F>, b.out_as<T>(), start, f);
  };
}

const Cases& atomic_cases() {
  static const Cases all{
      {"atomic_add_int", atomically<int>(5, [](int* x, unsigned t) { atomicAdd(x, int(t) - 20); })},
      {"atomic_add_unsigned", atomically<unsigned>(5, [](unsigned* x, unsigned t) { atomicAdd(x, t); })},
      {"atomic_add_64", atomically<U64>(5, [](U64* x, unsigned t) { atomicAdd(x, U64{t} << 33); })},
      {"atomic_add_float", atomically<float>(5, [](float* x, unsigned t) { atomicAdd(x, float(t)); })},
      {"atomic_add_double", atomically<double>(5, [](double* x, unsigned t) { atomicAdd(x, double(t)); })},
      {"atomic_sub", atomically<int>(5, [](int* x, unsigned t) { atomicSub(x, int(t)); })},
      {"atomic_min", atomically<int>(5, [](int* x, unsigned t) { atomicMin(x, 3 - int(t)); })},
      {"atomic_max_64", atomically<U64>(5, [](U64* x, unsigned t) { atomicMax(x, U64{t} << 40); })},
      {"atomic_max_signed_64",
       atomically<long long>(-9, [](long long* x, unsigned t) { atomicMax(x, -(long long)t); })},
      {"atomic_and", atomically<unsigned>(0xffff, [](unsigned* x, unsigned t) { atomicAnd(x, ~(1u << t % 8)); })},
      {"atomic_or", atomically<U64>(0, [](U64* x, unsigned t) { atomicOr(x, 1ull << t); })},
      {"atomic_xor", atomically<unsigned>(1, [](unsigned* x, unsigned t) { atomicXor(x, 1u << t % 32); })},
      {"atomic_inc", atomically<unsigned>(0, [](unsigned* x, unsigned) { atomicInc(x, 6u); })},
      {"atomic_dec", atomically<unsigned>(2, [](unsigned* x, unsigned) { atomicDec(x, 6u); })},
      {"atomic_exchange", atomically<float>(5, [](float* x, unsigned) { atomicExch(x, 2.5f); })},
      {"atomic_cas", atomically<U64>(0,
                                     [](U64* x, unsigned t) {
                                       for (U64 seen = 0; t < 40;) {  // adds t * t
                                         const U64 found = atomicCAS(x, seen, seen + t * t);
                                         if (found == seen) return;
                                         seen = found;
                                       }
                                     })},
      {"atomic_cas_16", atomically<unsigned short>(0,
                                                   [](unsigned short* x, unsigned t) {
                                                     for (unsigned short seen = 0; t < 40;) {
                                                       const unsigned short found =
                                                           atomicCAS(x, seen, static_cast<unsigned short>(seen + t));
                                                       if (found == seen) return;
                                                       seen = found;
                                                     }
                                                   })},
  };
  return all;
}

}  // namespace

const Cases& builtin_cases() {
  static const Cases all = [] {
    Cases joined = arithmetic_cases();
    for (const Cases* more : {&collective_cases(), &atomic_cases()}) joined.insert(more->begin(), more->end());
    return joined;
  }();
  return all;
}

}  // namespace tsr
