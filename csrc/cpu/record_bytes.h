// Numbers at any address: what lies in a file, or in memory that was one, is not aligned.
#pragma once
#include <cstdint>
#include <cstring>

namespace tsr {

template <class T>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
void store(void* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

inline uint64_t load_word(const uint8_t* from) { return load<uint64_t>(from); }

}  // namespace tsr
