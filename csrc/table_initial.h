// How a new row of a table begins: table_initialize_ and table_lookup (table.h), on both devices the same bits.
#pragma once
#include <cmath>
#include <cstring>

#include "hash_words.h"

namespace tsr {

enum InitialKind : int64_t { kConstant, kUniform, kNormal, kTruncatedNormal, kInitialKinds };

// How rows begin. Plain numbers: kernels take it by value.
struct Initial {
  int64_t kind;
  double a, b;  // value; low and high; mean and standard deviation
  uint64_t seed;
};

// a * b, rounded: nvcc would fuse it with a sum, and the device's values would not be the host's.
TSR_HOST_DEVICE TSR_ALWAYS_INLINE double rounded_product(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// c[0] x^(n-1) + ... + c[n-1].
template <int n>
TSR_HOST_DEVICE TSR_ALWAYS_INLINE double polynomial(const double (&c)[n], double x) {
  double sum = c[0];
  for (int k = 1; k < n; ++k) sum = rounded_product(sum, x) + c[k];
  return sum;
}

// The natural logarithm of a normal x > 0, from sums, products and quotients alone: the same bits on every device.
TSR_HOST_DEVICE inline double portable_log(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  bits = (bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double m;
  std::memcpy(&m, &bits, sizeof(m));
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  // 2 artanh(t) with |t| < 0.1716, whose next term is below 1e-18.
  const double t = (m - 1) / (m + 1);
  const double terms[] = {1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
                          1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
  return rounded_product(static_cast<double>(exponent), 0.6931471805599453) +
         rounded_product(2 * t, polynomial(terms, rounded_product(t, t)));
}

// The inverse of the normal distribution function, for p in (0, 1): Acklam's rational approximation, whose relative
// error is below 1.15e-9.
TSR_HOST_DEVICE inline double inverse_normal(double p) {
  const double low = 0.02425;
  if (p < low || p > 1 - low) {
    const double above[] = {-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e+00,
                            -2.549732539343734e+00, 4.374664141464968e+00,  2.938163982698783e+00};
    const double below[] = {7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00, 3.754408661907416e+00,
                            1.0};
    const double q = sqrt(-2 * portable_log(p < low ? p : 1 - p));
    const double x = polynomial(above, q) / polynomial(below, q);
    return p < low ? x : -x;
  }
  const double above[] = {-3.969683028665376e+01, 2.209460984245205e+02,  -2.759285104469687e+02,
                          1.383577518672690e+02,  -3.066479806614716e+01, 2.506628277459239e+00};
  const double below[] = {-5.447609879822406e+01, 1.615858368580409e+02,  -1.556989798598866e+02,
                          6.680131188771972e+01,  -1.328068155288572e+01, 1.0};
  const double q = p - 0.5, r = rounded_product(q, q);
  return rounded_product(polynomial(above, r), q) / polynomial(below, r);
}

// The state from which a key's columns draw their bits.
TSR_HOST_DEVICE TSR_ALWAYS_INLINE uint64_t initial_stream(const Initial& initial, int64_t key) {
  return hash_key(static_cast<int64_t>(hash_key(static_cast<int64_t>(initial.seed ^ 0x9E3779B97F4A7C15ull)) ^
                                       static_cast<uint64_t>(key) * 0xD6E8FEB86659FD93ull));
}

// A number in (0, 1), of 32 bits: splitmix64's next outputs, one for each pair of columns.
TSR_HOST_DEVICE TSR_ALWAYS_INLINE double initial_uniform(uint64_t stream, int64_t column) {
  uint64_t x = stream + static_cast<uint64_t>(column / 2 + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  x ^= x >> 31;
  const uint32_t half = static_cast<uint32_t>(column % 2 ? x >> 32 : x);
  return (static_cast<double>(half) + 0.5) * 0x1p-32;
}

TSR_HOST_DEVICE inline double initial_value(const Initial& initial, uint64_t stream, int64_t column) {
  if (initial.kind == kConstant) return initial.a;
  const double u = initial_uniform(stream, column);
  if (initial.kind == kUniform) return initial.a + rounded_product(initial.b - initial.a, u);
  // The distribution function at -2 and at 2, for the truncated one.
  const double low = 0.022750131948179195, width = 0.9544997361036416;
  return initial.a +
         rounded_product(initial.b, inverse_normal(initial.kind == kNormal ? u : low + rounded_product(width, u)));
}

// The number of T nearest to x. For half types by way of the one of x's two neighbours in float32 that is odd, where x
// is no float32: the nearest one may lie in the middle of two numbers of T, where x does not.
template <class T>
TSR_HOST_DEVICE TSR_ALWAYS_INLINE T rounded_once(double x) {
  float near = static_cast<float>(x);
  if constexpr (sizeof(T) == 2) {
    uint32_t bits;
    std::memcpy(&bits, &near, sizeof(bits));
    const double beyond = x < 0 ? near - x : x - near;  // how much farther from 0 x is
    if ((beyond > 0 || beyond < 0) && bits % 2 == 0) bits += beyond > 0 ? 1u : ~0u;
    std::memcpy(&near, &bits, sizeof(bits));
    return static_cast<T>(near);
  } else {
    return static_cast<T>(x);
  }
}

// The row of `values` that a key starts from.
TSR_HOST_DEVICE TSR_ALWAYS_INLINE int64_t default_row(int64_t key, int64_t rows) {
  const int64_t rest = key % rows;
  return rest < 0 ? rest + rows : rest;
}

}  // namespace tsr
