// Key sketches on the device: their layout, the rotation, the levels. The law: etserve/control/sketch.py.
//
// A block's sketch for one KV head:
//   codes   [16][token_bytes]: a token's codes, dimension d in the bits d * bits .. of its bytes
//   mean    bf16 [head_dim]: of the block's keys, not rotated
//   scales  bf16 [16]: rms of each token's rotated difference from the mean
#pragma once
#include "device.h"

namespace etserve::cuda {
namespace {

constexpr int kMaxSketchDim = 256;
// Levels in whole numbers, so that products are exact: +-57 and +-17 of 1/37.76 are +-1.51 and +-0.45 of the rms (2
// bits), +-57 of 1/71.44 is +-0.798 (1 bit).
constexpr float kLevelUnit2 = 1.0f / 37.76f, kLevelUnit1 = 1.0f / 71.44f;
constexpr float kOuterThreshold = 0.98f;  // of the rms: where the outer level of 2 bits begins
constexpr unsigned kLevels2 = 0x3911efc7u, kLevels1 = 0x000039c7u;  // as signed bytes, code 0 lowest

struct SketchLayout {
  int bits, head_dim, token_bytes;
  int64_t mean_at, scales_at, num_bytes;

  __host__ __device__ SketchLayout(int head_dim_, int bits_) : bits(bits_), head_dim(head_dim_) {
    token_bytes = (head_dim * bits + 31) / 32 * 4;
    mean_at = int64_t{kBlockTokens} * token_bytes;
    scales_at = mean_at + 2 * head_dim;
    num_bytes = (scales_at + 2 * kBlockTokens + 15) / 16 * 16;
  }
};

// The largest power of two that divides dim: what one transform mixes.
__device__ __forceinline__ int hadamard_size(int dim) { return dim & -dim; }

// Transforms `rows` vectors of `dim` in shared memory, not normalised. All threads of the block call.
__device__ void hadamard(float* x, int rows, int dim, int num_threads) {
  for (int width = 1; width < hadamard_size(dim); width *= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < rows * dim / 2; i += num_threads) {
      const int at = i / width * 2 * width + i % width;
      const float a = x[at], b = x[at + width];
      x[at] = a + b;
      x[at + width] = a - b;
    }
  }
  __syncthreads();
}

// The levels of four codes, as signed bytes: 2 bits each, or 1.
__device__ __forceinline__ unsigned levels_of(unsigned codes, int bits) {
  if (bits == 2) {
    const unsigned apart = (codes | codes << 4) & 0x0f0fu;
    return __byte_perm(kLevels2, 0, (apart | apart << 2) & 0x3333u);
  }
  return __byte_perm(kLevels1, 0, (codes & 1) | (codes & 2) << 3 | (codes & 4) << 6 | (codes & 8) << 9);
}

}  // namespace
}  // namespace etserve::cuda
