// Kernels with one mistake each, which the emulator must name (tests/cuda/test_emulation.py): argv[1] chooses.
#include <cstdio>
#include <cstdlib>

#include "device.h"

using namespace etserve::cuda;

namespace {

void divergent_barrier(float*) {
  if (threadIdx.x < 32)
    __syncthreads();  // first
  else
    __syncthreads();  // second
}
void thread_that_returned(float*) {
  if (threadIdx.x == 40) return;
  __syncthreads();
}
void absent_lane(float* out) {
  if (threadIdx.x % 32 != 7) out[threadIdx.x] = __shfl_xor_sync(kAllLanes, 1.0f, 1);
}
void divergent_shuffle(float* out) {
  if (threadIdx.x % 2 == 0)
    out[threadIdx.x] = __shfl_xor_sync(kAllLanes, 1.0f, 1);  // even
  else
    out[threadIdx.x] = __shfl_xor_sync(kAllLanes, 2.0f, 1);  // odd
}
void partial_mask(float* out) { out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 1); }
void write_behind_the_end(float*) {
  ETSERVE_SHARED(float, x, 64);
  x[threadIdx.x + 1] = 0.0f;
}
void too_much_shared_memory(float*) {
  ETSERVE_SHARED(double, x, 6145);
  x[threadIdx.x] = 0.0;
}
void unwritten_shared_memory(float* out) {
  ETSERVE_SHARED(float, x, 64);
  out[threadIdx.x] = x[threadIdx.x];
}
void missing_barrier(float* out) {
  ETSERVE_SHARED(float, x, 64);
  x[threadIdx.x] = 1.0f;
  out[threadIdx.x] = x[63 - threadIdx.x];
}
void correct(float* out) {
  ETSERVE_SHARED(float, x, 64);
  x[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = x[63 - threadIdx.x] + static_cast<float>(__syncthreads_count(threadIdx.x < 5)) - 5.0f;
}

struct Case {
  const char* name;
  void (*kernel)(float*);
};
#define CASE(name) {#name, name}
const Case kCases[] = {CASE(divergent_barrier),    CASE(thread_that_returned),   CASE(absent_lane),
                       CASE(divergent_shuffle),    CASE(partial_mask),           CASE(write_behind_the_end),
                       CASE(too_much_shared_memory), CASE(unwritten_shared_memory), CASE(missing_barrier), CASE(correct)};

}  // namespace

// Prints how many of the 64 results are not 1, in each of 8 orders of execution added up.
int main(int, char** argv) {
  for (const Case& c : kCases) {
    if (std::strcmp(argv[1], c.name) != 0) continue;
    int wrong = 0;
    for (uint64_t seed = 0; seed < 8; ++seed) {
      float out[64] = {};
      etserve::emulation::set_seed(seed);
      launch(c.kernel, dim3(1), 64, nullptr, static_cast<float*>(out));
      for (float x : out) wrong += x == 1.0f ? 0 : 1;
    }
    std::printf("%d\n", wrong);
    return 0;
  }
  return 2;
}
