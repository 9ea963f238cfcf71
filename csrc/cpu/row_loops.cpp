#include "row_loops.h"

#include <type_traits>

#include "level.h"
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's AVX-512 functions read variables that they leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace tsr {
namespace {

#define TSR_ISA_BODY "row_loops_body.h"
#include "isa_foreach.h"

}  // namespace

template <class T, class R>
const RowLoops<T, R>& row_loops() {
  return pick_level(baseline::kRowLoops<T, R>, avx2::kRowLoops<T, R>, avx512::kRowLoops<T, R>);
}

template <class T>
const DotLoop<T>& dot_loop() {
  return pick_level(baseline::kDotLoop<T>, avx2::kDotLoop<T>, avx512::kDotLoop<T>);
}

#define TSR_INSTANTIATE(T)                                        \
  template const RowLoops<T, uint32_t>& row_loops<T, uint32_t>(); \
  template const RowLoops<T, int64_t>& row_loops<T, int64_t>();   \
  template const DotLoop<T>& dot_loop<T>();
TSR_INSTANTIATE(float)
TSR_INSTANTIATE(double)
TSR_INSTANTIATE(Half)
TSR_INSTANTIATE(BFloat16)
#undef TSR_INSTANTIATE

}  // namespace tsr
