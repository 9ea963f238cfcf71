// In place of thrust's header, in front of which setup.py puts this folder: torch's headers include it for conversions
// of complex numbers, which the kernels have none of, and to read all of it took more than a second in every file. Were more
// of it asked for, the compiler would say so.
#pragma once

namespace thrust {

template <class T>
struct complex;
template <class T>
complex<T> polar(const T& r, const T& theta);

}  // namespace thrust
