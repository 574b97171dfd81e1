// A stack of its own for each fiber, and the switch from one to another.
#pragma once
#include <cstddef>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#ifdef __x86_64__
// Saves the callee-saved registers on this stack and goes on with another one.
extern "C" void etserve_emulation_switch(void** save, void* load) __attribute__((visibility("hidden")));
asm(R"(
.text
.globl etserve_emulation_switch
.hidden etserve_emulation_switch
.type etserve_emulation_switch, @function
etserve_emulation_switch:
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
.size etserve_emulation_switch, .-etserve_emulation_switch
)");
#endif

namespace etserve::emulation {
namespace {

constexpr size_t kStackBytes = 64 << 10;

void fiber_main();  // what every fiber runs; never returns

#ifdef __x86_64__
struct Context {
  void* stack_pointer = nullptr;
  void start(char* stack) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes);
    *--top = nullptr;  // where a return address would lie: keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer = top;
  }
  static void change(Context& from, Context& to) { etserve_emulation_switch(&from.stack_pointer, to.stack_pointer); }
};
#else
struct Context {
  ucontext_t context;
  void start(char* stack) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
  }
  static void change(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};
#endif

}  // namespace
}  // namespace etserve::emulation
