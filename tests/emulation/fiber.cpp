#include "fiber.h"

#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves the registers that a call must preserve on the stack that is left, and restores those of the stack that is
// resumed. The system's swapcontext does the same with one system call more.
extern "C" void tsr_emulated_switch(void** left, void* resumed);
asm(R"(
.text
.type tsr_emulated_switch, @function
.hidden tsr_emulated_switch
.globl tsr_emulated_switch
tsr_emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tsr_emulated_switch, .-tsr_emulated_switch
)");
#endif

namespace tsr::emulated {
namespace {

Fiber* running = nullptr;

// The stack that resumes fibers.
struct Home {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* sanitizer_stack = nullptr;
  const void* bottom = nullptr;
  size_t bytes = 0;
} home;

void before_switch([[maybe_unused]] void** save, [[maybe_unused]] const void* bottom, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(save, bottom, bytes);
#endif
}

void after_switch([[maybe_unused]] void* saved, [[maybe_unused]] const void** bottom, [[maybe_unused]] size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(saved, bottom, bytes);
#endif
}

}  // namespace

void Fiber::enter() {
  after_switch(nullptr, &home.bottom, &home.bytes);
  running->main_();
  std::abort();
}

#if defined(__x86_64__)

// The stack is not initialised: the system gives memory to the pages that are used.
Fiber::Fiber(void (*main)()) : stack_(new uint8_t[kStackBytes]), main_(main) {
  uintptr_t top = reinterpret_cast<uintptr_t>(stack_.get() + kStackBytes) & ~uintptr_t{15};
  // The switch pops six registers and the address of enter(), which expects a return address above it.
  void** frame = reinterpret_cast<void**>(top) - 8;
  for (int i = 0; i < 8; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(&Fiber::enter);
  stack_pointer_ = frame;
}

void Fiber::resume() {
  running = this;
  before_switch(&home.sanitizer_stack, stack_.get(), kStackBytes);
  tsr_emulated_switch(&home.stack_pointer, stack_pointer_);
  after_switch(home.sanitizer_stack, nullptr, nullptr);
}

void Fiber::leave() {
  Fiber* const self = running;
  before_switch(&self->sanitizer_stack_, home.bottom, home.bytes);
  tsr_emulated_switch(&self->stack_pointer_, home.stack_pointer);
  after_switch(self->sanitizer_stack_, &home.bottom, &home.bytes);
}

#else

// The stack is not initialised: the system gives memory to the pages that are used.
Fiber::Fiber(void (*main)()) : stack_(new uint8_t[kStackBytes]), main_(main) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_.get();
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::enter, 0);
}

void Fiber::resume() {
  running = this;
  before_switch(&home.sanitizer_stack, stack_.get(), kStackBytes);
  swapcontext(&home.context, &context_);
  after_switch(home.sanitizer_stack, nullptr, nullptr);
}

void Fiber::leave() {
  Fiber* const self = running;
  before_switch(&self->sanitizer_stack_, home.bottom, home.bytes);
  swapcontext(&self->context_, &home.context);
  after_switch(self->sanitizer_stack_, &home.bottom, &home.bytes);
}

#endif

}  // namespace tsr::emulated
