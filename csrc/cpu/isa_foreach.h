// Compiles the file named by TSR_ISA_BODY once per instruction set, as namespaces baseline, avx2 and avx512, with
// TSR_ISA_LEVEL set to 0, 1 and 2. No include guard: each family's loops include it once.
//
// The target is set by pragma and not by compiler flags so that everything from the standard library and torch keeps
// the baseline target: an inline function compiled for AVX-512 and merged by the linker would crash older machines. So
// every header a body needs must be included before this file, and a body holds only static functions.
//
// Multiplications and additions are never contracted (-ffp-contract=off in setup.py): all levels give the same bits.

#define TSR_ISA_LEVEL 0
namespace baseline {
#include TSR_ISA_BODY
}
#undef TSR_ISA_LEVEL

#if defined(__x86_64__)
#define TSR_ISA_LEVEL 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,lzcnt,popcnt,f16c")
#endif
namespace avx2 {
#include TSR_ISA_BODY
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef TSR_ISA_LEVEL

#define TSR_ISA_LEVEL 2
#if defined(__clang__)
#pragma clang attribute push(                                                                                         \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,lzcnt,popcnt,f16c,prefer-vector-width=512"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,lzcnt,popcnt,f16c,prefer-vector-width=512")
#endif
namespace avx512 {
#include TSR_ISA_BODY
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef TSR_ISA_LEVEL
#else
// One level only: the other names of the tables stand for it.
namespace avx2 = baseline;
namespace avx512 = baseline;
#endif
#undef TSR_ISA_BODY
