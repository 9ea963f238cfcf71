// Shared by the cases of faults.cu, builtins.cu, primitives.cu and races.cu.
#pragma once
#include <functional>
#include <map>
#include <string>

#include "cuda.h"

namespace tsr {

// The memory of a case: 256 bytes of zeros in device memory, which the test reads afterwards.
struct Bench {
  DeviceCall call;
  float* out;
  explicit Bench(const Tensor& like) : call("fault", like), out(call.workspace<float>(64)) {
    fill_bytes(call.stream(), out, 0, 64 * sizeof(float));
  }
  template <class T>
  T* out_as() const {
    return reinterpret_cast<T*>(out);
  }
};

using Cases = std::map<std::string, std::function<void(Bench&)>>;

const Cases& kernel_cases();
const Cases& builtin_cases();
const Cases& primitive_cases();
const Cases& race_cases();

}  // namespace tsr
