#include "quantized_loops.h"

#include <type_traits>

#include "level.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tsr {
namespace {

#define TSR_ISA_BODY "quantized_loops_body.h"
#include "isa_foreach.h"

}  // namespace

template <class F, class R>
const QuantizedLoops<F, R>& quantized_loops() {
  return pick_level(baseline::kQuantizedLoops<F, R>, avx2::kQuantizedLoops<F, R>, avx512::kQuantizedLoops<F, R>);
}

#define TSR_INSTANTIATE(F)                                                    \
  template const QuantizedLoops<F, uint32_t>& quantized_loops<F, uint32_t>(); \
  template const QuantizedLoops<F, int64_t>& quantized_loops<F, int64_t>();
TSR_INSTANTIATE(Int8)
TSR_INSTANTIATE(Int4)
TSR_INSTANTIATE(Half)
TSR_INSTANTIATE(BFloat16)
#undef TSR_INSTANTIATE

}  // namespace tsr
