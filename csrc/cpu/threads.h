// A team of threads that runs one function side by side (SPMD), with barriers inside.
//
// Own pool instead of OpenMP: a decode step is ~300 phases of tens of microseconds, torch brings an OpenMP runtime of
// its own, and an OpenMP team either spins without bound (ruinous beside another process) or sleeps at every barrier.
// Here waiting spins for a bounded time, then sleeps in the kernel.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

namespace etserve::cpu {

class Pool;

// One member's view of the running team. Every member calls the same functions in the same order.
class Team {
 public:
  int rank() const { return rank_; }
  int size() const { return size_; }
  void barrier();
  // Work sharing inside one phase: hands out 0, 1, 2, ... across the team. Reset by the next barrier.
  int64_t next();
  // The part [begin, end) of [0, count) that belongs to this member, in multiples of `grain`.
  void split(int64_t count, int64_t grain, int64_t* begin, int64_t* end) const;

 private:
  friend class Pool;
  Pool* pool_ = nullptr;
  int rank_ = 0, size_ = 1;
};

class Pool {
 public:
  explicit Pool(int num_threads);  // the caller of run() is member 0; num_threads - 1 workers are made
  ~Pool();
  int size() const;
  // Runs fn(arg, team) on every member and returns when all are done. One run at a time (callers are serialised).
  void run(void (*fn)(void*, Team&), void* arg);
  template <class F>
  void run(F&& f) {
    run([](void* p, Team& t) { (*static_cast<F*>(p))(t); }, const_cast<void*>(static_cast<const void*>(&f)));
  }

 private:
  friend class Team;
  struct State;
  std::unique_ptr<State> state_;
};

Pool& global_pool();              // made on first use with set_num_threads' value, default 1
void set_num_threads(int count);  // replaces the pool; not while it runs

}  // namespace etserve::cpu
