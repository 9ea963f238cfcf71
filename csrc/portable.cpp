// What a new glibc or libstdc++ would bind the library to, defined with what every glibc from 2.28 on, and libstdc++ of
// GCC 8, has: so a wheel is manylinux_2_28 wherever it is made. All is hidden: other libraries see nothing of it.
#include <cxxabi.h>

#include <new>
#include <sstream>

#if defined(__GLIBC__) && defined(__x86_64__)
#define TSR_FIRST "@GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define TSR_FIRST "@GLIBC_2.17"
#endif

#if defined(TSR_FIRST) && defined(__GLIBCXX__)
extern "C" {

// The pow, exp and log of 2.29 differ in errno, not in bits.
double tsr_first_pow(double base, double exponent);
__asm__(".symver tsr_first_pow, pow" TSR_FIRST);
double tsr_pow(double base, double exponent) __asm__("pow");
double tsr_pow(double base, double exponent) { return tsr_first_pow(base, exponent); }
double tsr_first_exp(double exponent);
__asm__(".symver tsr_first_exp, exp" TSR_FIRST);
double tsr_exp(double exponent) __asm__("exp");
double tsr_exp(double exponent) { return tsr_first_exp(exponent); }
double tsr_first_log(double x);
__asm__(".symver tsr_first_log, log" TSR_FIRST);
double tsr_log(double x) __asm__("log");
double tsr_log(double x) { return tsr_first_log(x); }

// Since 2.32: whether counts of references need no atomic operations. Here they always have them.
char __libc_single_threaded = 0;

// Constructors without arguments, of GCC 9, and an error, of GCC 11. They would be taken from torch's libraries, where
// they happen to be.
void tsr_string_stream(void* self) __asm__("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void tsr_string_stream(void* self) { new (self) std::stringstream(std::ios_base::in | std::ios_base::out); }
void tsr_output_stream(void* self) __asm__("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void tsr_output_stream(void* self) { new (self) std::ostringstream(std::ios_base::out); }
void tsr_bad_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void tsr_bad_length() { abi::__cxa_throw_bad_array_new_length(); }

}  // extern "C"
#endif
