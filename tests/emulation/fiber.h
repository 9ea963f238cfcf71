// A stack of its own that a function runs on, and is left and resumed at any point of.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace tsr::emulated {

// Of one host thread. Memory errors are found on the right stack: AddressSanitizer is told of every switch.
class Fiber {
 public:
  // The first resume runs `main`, which must never return.
  explicit Fiber(void (*main)());
  void resume();
  // Whether the address is in its stack.
  bool has(const void* address) const {
    return static_cast<size_t>(static_cast<const uint8_t*>(address) - stack_.get()) < kStackBytes;
  }
  // Back to where the running fiber was resumed.
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
