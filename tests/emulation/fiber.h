// A function that runs on a stack of its own, and can be left and resumed at any point.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace tsr::emulated {

// A fiber belongs to one host thread. AddressSanitizer is told of every switch, so it knows the right stack.
class Fiber {
 public:
  // The first resume runs `main`, which must never return.
  explicit Fiber(void (*main)());
  void resume();
  // Whether the address is in the fiber's stack.
  bool has(const void* address) const {
    return static_cast<size_t>(static_cast<const uint8_t*>(address) - stack_.get()) < kStackBytes;
  }
  // Returns to where the running fiber was resumed.
  static void leave();

 private:
  static constexpr size_t kStackBytes = 128 << 10;
  static void enter();

  std::unique_ptr<uint8_t[]> stack_;
  void (*main_)();
  void* sanitizer_stack_ = nullptr;
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
};

}  // namespace tsr::emulated
