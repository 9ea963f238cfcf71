// Device and shared memory whose ends are watched.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tsr::emulated {

// One block's shared arrays, filled with ones (NaN) and watched on both sides.
class SharedMemory {
 public:
  void* get(const void* key, size_t bytes);
  size_t bytes() const;  // of all arrays except the dynamic one, whose key is null
  void check() const;
  void clear() { arrays_.clear(); }

 private:
  struct Array {
    const void* key;
    size_t bytes;
    std::unique_ptr<uint8_t[]> memory;
    uint8_t* start;
  };
  std::vector<Array> arrays_;
};

}  // namespace tsr::emulated
