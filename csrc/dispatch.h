// The dtypes the kernels are compiled for, and the one way to pick among them: f receives a type_tag<T>.
// Templates, not macros: a macro breaks on commas in its body.
#pragma once
#include "abi.h"

// Arithmetic that CPU and CUDA share: it calls nothing of the standard library and takes no tensors.
#ifdef __CUDACC__
#define TSR_HOST_DEVICE __host__ __device__
#else
#define TSR_HOST_DEVICE
#endif
// What is called inside loops that are compiled for an instruction set of their own: cpu/isa_foreach.h.
#ifdef __CUDACC__
#define TSR_ALWAYS_INLINE __forceinline__
#else
#define TSR_ALWAYS_INLINE inline __attribute__((always_inline))
#endif

namespace tsr {

template <class T>
struct type_tag {
  using type = T;
};

inline const char* dtype_name(ScalarType t) { return torch::headeronly::toString(t); }

// Half types accumulate in float32 and are rounded once.
template <class T>
struct accumulator {
  using type = T;
};
template <>
struct accumulator<Half> {
  using type = float;
};
template <>
struct accumulator<BFloat16> {
  using type = float;
};
template <class T>
using acc_t = typename accumulator<T>::type;

template <class F>
decltype(auto) dispatch_float(ScalarType t, const char* op, const char* argument, F&& f) {
  switch (t) {
    case ScalarType::Float:
      return f(type_tag<float>{});
    case ScalarType::Double:
      return f(type_tag<double>{});
    case ScalarType::Half:
      return f(type_tag<Half>{});
    case ScalarType::BFloat16:
      return f(type_tag<BFloat16>{});
    default:
      throw std::invalid_argument(
          message(op, ": ", argument, " must be float16, bfloat16, float32 or float64, got ", dtype_name(t)));
  }
}

template <class F>
decltype(auto) dispatch_index(ScalarType t, const char* op, const char* argument, F&& f) {
  switch (t) {
    case ScalarType::Int:
      return f(type_tag<int32_t>{});
    case ScalarType::Long:
      return f(type_tag<int64_t>{});
    default:
      throw std::invalid_argument(message(op, ": ", argument, " must be int32 or int64, got ", dtype_name(t)));
  }
}

// Every integer dtype, as the signed or unsigned C++ type of its width.
template <class F>
decltype(auto) dispatch_integer(ScalarType t, const char* op, const char* argument, F&& f) {
  switch (t) {
    case ScalarType::Byte:
      return f(type_tag<uint8_t>{});
    case ScalarType::Char:
      return f(type_tag<int8_t>{});
    case ScalarType::Short:
      return f(type_tag<int16_t>{});
    case ScalarType::Int:
      return f(type_tag<int32_t>{});
    case ScalarType::Long:
      return f(type_tag<int64_t>{});
    case ScalarType::UInt16:
      return f(type_tag<uint16_t>{});
    case ScalarType::UInt32:
      return f(type_tag<uint32_t>{});
    case ScalarType::UInt64:
      return f(type_tag<uint64_t>{});
    default:
      throw std::invalid_argument(message(op, ": ", argument, " must have an integer dtype, got ", dtype_name(t)));
  }
}

}  // namespace tsr
