// The emulator's scheduler: see emulation.h.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "emulation_context.h"

namespace etserve::emulation {
namespace {

constexpr size_t kMaxSharedBytes = 48 << 10;  // of statically declared arrays
constexpr size_t kGuardBytes = 64;
constexpr unsigned char kPoison = 0xff, kGuard = 0xa5;

enum class State { ready, at_barrier, at_warp, returned };
const char* const kStateNames[] = {"ready", "at a barrier", "at a warp operation", "returned"};

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state = State::ready;
  Place place;
  unsigned warp_phase = 0, block_phase = 0;
};
struct Warp {
  uint64_t slots[2][32];  // a lane brings the next value only when all have met, so two sets suffice
  int arrived = 0;
};
struct SharedArray {
  std::unique_ptr<unsigned char[]> memory;
  size_t bytes;
};

std::mutex launch_mutex;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
std::map<const void*, SharedArray> shared;
Context scheduler;
const std::function<void()>* body;
unsigned num_threads, running, block_arrived;
int block_sums[2];
uint64_t random_state = 0x9e3779b97f4a7c15u;

unsigned random_below(unsigned n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<unsigned>((random_state >> 11) % n);
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "cuda emulation: %s in block (%u, %u, %u)\n", what, blockIdx.x, blockIdx.y, blockIdx.z);
  std::map<std::pair<std::string, State>, std::pair<unsigned, unsigned>> where;  // -> first thread, count
  for (unsigned t = 0; t < num_threads; ++t) {
    const Fiber& f = *fibers[t];
    auto& entry = where[{std::string(f.place.file_name()) + ":" + std::to_string(f.place.line()), f.state}];
    if (entry.second++ == 0) entry.first = t;
  }
  for (const auto& [key, value] : where)
    std::fprintf(stderr, "  %u threads, first %u: %s, %s\n", value.second, value.first, kStateNames[int(key.second)],
                 key.first.c_str());
  std::abort();
}

void fiber_main() {
  (*body)();
  fibers[running]->state = State::returned;
  Context::change(fibers[running]->context, scheduler);
  std::abort();  // a returned fiber is never resumed
}

void wait() { Context::change(fibers[running]->context, scheduler); }

void release(unsigned first, unsigned end, const char* what) {
  for (unsigned t = first; t < end; ++t) {
    const Place a = fibers[first]->place, b = fibers[t]->place;
    if (a.line() != b.line() || std::strcmp(a.file_name(), b.file_name()) != 0) fail(what);
  }
  for (unsigned t = first; t < end; ++t) fibers[t]->state = State::ready;
}

bool run_warp(unsigned warp) {
  bool moved = false;
  for (bool again = true; again;) {
    again = false;
    const unsigned start = random_below(32), step = 2 * random_below(16) + 1;
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned t = warp * 32 + ((start + i * step) & 31);
      if (fibers[t]->state != State::ready) continue;
      running = t;
      threadIdx = dim3(t, 0, 0);
      Context::change(scheduler, fibers[t]->context);
      again = moved = true;
    }
  }
  return moved;
}

void check_guards() {
  for (const auto& [site, array] : shared)
    for (size_t i = 0; i < kGuardBytes; ++i)
      if (array.memory[array.bytes + i] != kGuard) fail("write behind a shared array");
}

void run_block() {
  shared.clear();
  block_arrived = 0;
  block_sums[0] = block_sums[1] = 0;
  warps.assign(num_threads / 32, Warp{});
  while (fibers.size() < num_threads) fibers.push_back(std::make_unique<Fiber>());
  for (unsigned t = 0; t < num_threads; ++t) {
    Fiber& f = *fibers[t];
    f.state = State::ready;
    f.place = Place();
    f.warp_phase = f.block_phase = 0;
    f.context.start(f.stack.get());
  }
  const auto num_warps = static_cast<unsigned>(warps.size());
  for (bool moved = true; moved;) {
    moved = false;
    const unsigned start = random_below(num_warps);
    const bool backwards = random_below(2) == 1;
    for (unsigned i = 0; i < num_warps; ++i)
      moved |= run_warp((start + (backwards ? num_warps - i : i)) % num_warps);
  }
  for (unsigned t = 0; t < num_threads; ++t)
    if (fibers[t]->state != State::returned) fail("divergent barrier or warp operation");
  check_guards();
}

}  // namespace

int lane() { return static_cast<int>(running % 32); }

const uint64_t* meet_warp(unsigned mask, uint64_t mine, Place place) {
  Fiber& f = *fibers[running];
  f.place = place;
  if (mask != 0xffffffffu) fail("warp operation of less than all lanes");
  const unsigned self = running;
  Warp& warp = warps[self / 32];
  uint64_t* slots = warp.slots[f.warp_phase++ & 1];
  slots[self % 32] = mine;
  f.state = State::at_warp;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    release(self / 32 * 32, self / 32 * 32 + 32, "divergent warp operation");
  } else {
    wait();
  }
  return slots;
}

int meet_block(int mine, Place place) {
  Fiber& f = *fibers[running];
  f.place = place;
  f.state = State::at_barrier;
  int& sum = block_sums[f.block_phase++ & 1];
  sum += mine;
  if (++block_arrived == num_threads) {
    block_arrived = 0;
    block_sums[f.block_phase & 1] = 0;  // of the next meeting; everybody has read what stood there
    release(0, num_threads, "divergent barrier");
  } else {
    wait();
  }
  return sum;
}

void* shared_array(const void* site, size_t bytes) {
  auto found = shared.find(site);
  if (found == shared.end()) {
    size_t total = bytes;
    for (const auto& [other, array] : shared) total += array.bytes;
    if (total > kMaxSharedBytes) fail("more than 48 KB of shared memory");
    SharedArray array{std::unique_ptr<unsigned char[]>(new unsigned char[bytes + kGuardBytes]), bytes};
    std::memset(array.memory.get(), kPoison, bytes);
    std::memset(array.memory.get() + bytes, kGuard, kGuardBytes);
    found = shared.emplace(site, std::move(array)).first;
  }
  return found->second.memory.get();
}

void set_seed(uint64_t seed) { random_state = seed * 0x9e3779b97f4a7c15u | 1; }

void run(dim3 grid, unsigned threads, const std::function<void()>& kernel) {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  body = &kernel;
  num_threads = threads;
  gridDim = grid;
  blockDim = dim3(threads);
  if (threads == 0 || threads % 32 != 0 || threads > 1024) fail("a block of other than whole warps");
  const unsigned count = grid.x * grid.y * grid.z, start = count > 0 ? random_below(count) : 0;
  for (unsigned i = 0; i < count; ++i) {
    const unsigned at = (start + (count - i)) % count;
    blockIdx = dim3(at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y);
    run_block();
  }
}

}  // namespace etserve::emulation
