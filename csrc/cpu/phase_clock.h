// Where the time of a decoder's calls goes, as member 0 of the team sees it. Off: a branch a phase.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>

namespace etserve::cpu {

enum class Phase { setup, elementwise, matrices, kv_write, attention, head, count };  // names: bind_decoder.cpp

class PhaseClock {
 public:
  bool is_on = false;

  void start() {
    if (is_on) last_ = now();
  }
  // What passed since the mark before it belongs to `phase`.
  void mark(Phase phase) {
    if (!is_on) return;
    const int64_t at = now();
    nanoseconds_[static_cast<size_t>(phase)] += at - last_;
    last_ = at;
  }
  // Sums since the last call.
  std::array<int64_t, static_cast<size_t>(Phase::count)> take() {
    const auto found = nanoseconds_;
    nanoseconds_.fill(0);
    return found;
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  std::array<int64_t, static_cast<size_t>(Phase::count)> nanoseconds_{};
  int64_t last_ = 0;
};

}  // namespace etserve::cpu
