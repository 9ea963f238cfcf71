// CUDA's builtins for a single thread: vector types, loads and stores with a cache policy, arithmetic. Those by which
// threads work together are in collectives.h.
//
// They have CUDA's names, types and results, so that nvcc and g++ read the same source. A builtin that is not here does
// not compile in emulation.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine.h"

// ---- Vectors --------------------------------------------------------------------------------------------------------

namespace tsr::emulated {
template <class T>
inline constexpr bool is_vector = false;
}  // namespace tsr::emulated

#define TSR_VECTOR_TYPES(T, name, align2, align4)                            \
  struct alignas(align2) name##2 { T x, y; };                                \
  struct alignas(align4) name##4 { T x, y, z, w; };                          \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                 \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; } \
  template <>                                                                \
  inline constexpr bool tsr::emulated::is_vector<name##2> = true;            \
  template <>                                                                \
  inline constexpr bool tsr::emulated::is_vector<name##4> = true

TSR_VECTOR_TYPES(int8_t, char, 2, 4);
TSR_VECTOR_TYPES(uint8_t, uchar, 2, 4);
TSR_VECTOR_TYPES(short, short, 4, 8);
TSR_VECTOR_TYPES(unsigned short, ushort, 4, 8);
TSR_VECTOR_TYPES(int, int, 8, 16);
TSR_VECTOR_TYPES(unsigned, uint, 8, 16);
TSR_VECTOR_TYPES(float, float, 8, 16);
TSR_VECTOR_TYPES(long long, longlong, 16, 16);
TSR_VECTOR_TYPES(unsigned long long, ulonglong, 16, 16);
TSR_VECTOR_TYPES(double, double, 16, 16);
#undef TSR_VECTOR_TYPES

// ---- Loads and stores with a cache policy ---------------------------------------------------------------------------

namespace tsr::emulated {

// Hardware moves at most 16 bytes in one access, at an address that is a multiple of their number.
template <class T>
void check_access(const T* address) {
  static_assert((std::is_arithmetic_v<T> || is_vector<T>) && sizeof(T) <= 16);
  check_alignment(address, sizeof(T));
}
template <class T>
TSR_EMULATED_INLINE T load(const T* from) {
  check_access(from);
  return *from;
}
template <class T>
TSR_EMULATED_INLINE void store(T* to, const std::common_type_t<T>& value) {
  check_access(to);
  *to = value;
}

}  // namespace tsr::emulated

#define TSR_LOAD(name)                        \
  template <class T>                          \
  TSR_EMULATED_INLINE T name(const T* from) { \
    return tsr::emulated::load(from);         \
  }
TSR_LOAD(__ldg)
TSR_LOAD(__ldca)
TSR_LOAD(__ldcg)
TSR_LOAD(__ldcs)
TSR_LOAD(__ldlu)
TSR_LOAD(__ldcv)
#undef TSR_LOAD

#define TSR_STORE(name)                                                      \
  template <class T>                                                         \
  TSR_EMULATED_INLINE void name(T* to, const std::common_type_t<T>& value) { \
    tsr::emulated::store(to, value);                                         \
  }
TSR_STORE(__stwb)
TSR_STORE(__stcg)
TSR_STORE(__stcs)
TSR_STORE(__stwt)
#undef TSR_STORE

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

// The result has the common type of both arguments; of a NaN and a number it is the number.
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(static_cast<T>(a), static_cast<T>(b));
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(static_cast<T>(a), static_cast<T>(b));
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(int64_t{a} * b >> 32); }
__extension__ typedef unsigned __int128 tsr_uint128;
__extension__ typedef __int128 tsr_int128;
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<tsr_uint128>(a) * b >> 64);
}
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<tsr_int128>(a) * b >> 64);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1) << (31 - bit);
  return reversed;
}
inline unsigned long long __brevll(unsigned long long x) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
         __brev(static_cast<unsigned>(x >> 32));
}
// The high (l) or low (r) half of high:low, shifted by the low 5 bits of `shift` (lc and rc: by at most 32).
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}
// The selector's i-th hexadecimal digit is the number of the byte of y:x that becomes byte i of the result.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned digit = selector >> 4 * i & 15;
    unsigned byte = static_cast<unsigned>(bytes >> 8 * (digit & 7)) & 0xff;
    if (digit & 8) byte = byte & 0x80 ? 0xff : 0;  // the byte's sign, eight times
    result |= byte << 8 * i;
  }
  return result;
}

template <class To, class From>
To tsr_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
inline int __float_as_int(float x) { return tsr_bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return tsr_bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return tsr_bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return tsr_bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return tsr_bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return tsr_bit_cast<double>(x); }

// Additions and multiplications here are never fused to one operation; __fmaf_rn and __fma_rn always are one.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
