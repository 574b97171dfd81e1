#include "threads.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace etserve::cpu {
namespace {

constexpr auto kSpin = std::chrono::microseconds(40);  // longer than a phase's jitter, shorter than a time slice
constexpr int kMaxThreads = 512;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spin for kSpin, then sleep in the kernel until `word` is no longer `seen`.
void wait_while(const std::atomic<uint32_t>& word, uint32_t seen) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (word.load(std::memory_order_acquire) != seen) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  while (word.load(std::memory_order_acquire) == seen) word.wait(seen, std::memory_order_acquire);
}

}  // namespace

// Threads are not pinned: the caller (member 0) is not ours to pin, and on a machine as small as the team a pinned
// worker would queue behind whoever else runs on its core while another core is idle.
struct Pool::State {
  int size;
  std::vector<std::thread> workers;
  std::mutex run_mutex;
  void (*fn)(void*, Team&) = nullptr;
  void* arg = nullptr;
  alignas(64) std::atomic<uint32_t> epoch{0};  // bumped to start a run
  std::atomic<bool> stopping{false};
  alignas(64) std::atomic<uint32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};  // bumped by the last member to arrive
  alignas(64) std::atomic<int64_t> item{0};

  void barrier() {
    const uint32_t seen = phase.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size)) {
      arrived.store(0, std::memory_order_relaxed);
      item.store(0, std::memory_order_relaxed);
      phase.store(seen + 1, std::memory_order_release);
      phase.notify_all();
    } else {
      wait_while(phase, seen);
    }
  }
};

void Team::barrier() {
  if (size_ > 1)
    pool_->state_->barrier();
  else
    pool_->state_->item.store(0, std::memory_order_relaxed);
}

int64_t Team::next() { return pool_->state_->item.fetch_add(1, std::memory_order_relaxed); }

void Team::split(int64_t count, int64_t grain, int64_t* begin, int64_t* end) const {
  const int64_t units = (count + grain - 1) / grain;
  const int64_t share = units / size_, rest = units % size_;
  const int64_t first = rank_ * share + std::min<int64_t>(rank_, rest);
  const int64_t last = first + share + (rank_ < rest ? 1 : 0);
  *begin = std::min(first * grain, count);
  *end = std::min(last * grain, count);
}

Pool::Pool(int num_threads) : state_(std::make_unique<State>()) {
  if (num_threads < 1 || num_threads > kMaxThreads) throw std::invalid_argument("num_threads must be in 1 .. 512");
  State* s = state_.get();
  s->size = num_threads;
  for (int rank = 1; rank < num_threads; ++rank) {
    s->workers.emplace_back([this, s, rank] {
      Team team;
      team.pool_ = this;
      team.rank_ = rank;
      team.size_ = s->size;
      for (uint32_t seen = 0;; ++seen) {
        wait_while(s->epoch, seen);
        if (s->stopping.load(std::memory_order_acquire)) return;
        s->fn(s->arg, team);
        s->barrier();  // the run's end
      }
    });
  }
}

Pool::~Pool() {
  State* s = state_.get();
  s->stopping.store(true, std::memory_order_release);
  s->epoch.fetch_add(1, std::memory_order_release);
  s->epoch.notify_all();
  for (std::thread& worker : s->workers) worker.join();
}

int Pool::size() const { return state_->size; }

void Pool::run(void (*fn)(void*, Team&), void* arg) {
  State* s = state_.get();
  std::lock_guard<std::mutex> lock(s->run_mutex);
  Team team;
  team.pool_ = this;
  team.size_ = s->size;
  s->item.store(0, std::memory_order_relaxed);
  if (s->size > 1) {
    s->fn = fn;
    s->arg = arg;
    s->epoch.fetch_add(1, std::memory_order_release);
    s->epoch.notify_all();
  }
  fn(arg, team);
  team.barrier();
}

namespace {
std::mutex g_pool_mutex;
std::unique_ptr<Pool> g_pool;
}  // namespace

Pool& global_pool() {
  std::lock_guard<std::mutex> lock(g_pool_mutex);
  if (!g_pool) g_pool = std::make_unique<Pool>(1);
  return *g_pool;
}

void set_num_threads(int count) {
  auto fresh = std::make_unique<Pool>(count);
  std::lock_guard<std::mutex> lock(g_pool_mutex);
  g_pool = std::move(fresh);
}

}  // namespace etserve::cpu
