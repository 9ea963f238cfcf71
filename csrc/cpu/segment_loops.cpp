#include "segment_loops.h"

#include <type_traits>

#include "level.h"
#include "row_loops.h"
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's AVX-512 functions read variables that they leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace tsr {
namespace {

#define TSR_ISA_BODY "segment_body.h"
#include "isa_foreach.h"

}  // namespace

template <class T>
const ReduceLoops<T>& reduce_loops() {
  return pick_level(baseline::kReduceLoops<T>, avx2::kReduceLoops<T>, avx512::kReduceLoops<T>);
}

template <class T>
const ReduceBackwardLoops<T>& reduce_backward_loops() {
  return pick_level(baseline::kReduceBackwardLoops<T>, avx2::kReduceBackwardLoops<T>, avx512::kReduceBackwardLoops<T>);
}

#define TSR_INSTANTIATE(T) template const ReduceLoops<T>& reduce_loops<T>();
TSR_INSTANTIATE(float)
TSR_INSTANTIATE(double)
TSR_INSTANTIATE(Half)
TSR_INSTANTIATE(BFloat16)
TSR_INSTANTIATE(uint8_t)
TSR_INSTANTIATE(uint16_t)
TSR_INSTANTIATE(uint32_t)
TSR_INSTANTIATE(uint64_t)
#undef TSR_INSTANTIATE

template const ReduceBackwardLoops<float>& reduce_backward_loops<float>();
template const ReduceBackwardLoops<double>& reduce_backward_loops<double>();
template const ReduceBackwardLoops<Half>& reduce_backward_loops<Half>();
template const ReduceBackwardLoops<BFloat16>& reduce_backward_loops<BFloat16>();

}  // namespace tsr
