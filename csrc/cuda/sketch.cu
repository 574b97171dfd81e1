// Sketches of the blocks that a step has filled, from the keys in the cache: the end of the KV write.
#include "sketch.h"

namespace etserve::cuda {
namespace {

constexpr int kThreads = 128;

__device__ unsigned code_of(float x, float rms, int bits) {
  const unsigned code = x > 0.0f ? 1u : 0u;
  if (bits == 1) return code;
  return code + (x > -kOuterThreshold * rms ? 1u : 0u) + (x > kOuterThreshold * rms ? 1u : 0u);
}

// One block of threads per token and KV head; those whose token fills no block have nothing to do.
template <class T>
__global__ void __launch_bounds__(kThreads) sketch(EtserveSketch a) {
  ETSERVE_SHARED(float, keys, kBlockTokens * kMaxSketchDim);
  ETSERVE_SHARED(float, rms, kBlockTokens);
  const int64_t slot = a.slots[blockIdx.x];
  if (slot < 0 || slot % kBlockTokens != kBlockTokens - 1) return;
  const int kv_head = blockIdx.y, dim = a.head_dim;
  const int64_t block = slot / kBlockTokens;
  const SketchLayout layout(dim, a.bits);
  const T* from = static_cast<const T*>(a.kv) + (block * 2 * a.num_kv_heads + kv_head) * kBlockTokens * dim;
  unsigned char* to = static_cast<unsigned char*>(a.sketches) + (block * a.num_kv_heads + kv_head) * layout.num_bytes;
  Bf16* mean = reinterpret_cast<Bf16*>(to + layout.mean_at);
  Bf16* scales = reinterpret_cast<Bf16*>(to + layout.scales_at);
  for (int d = threadIdx.x; d < dim; d += kThreads) {
    float sum = 0.0f;
    for (int t = 0; t < kBlockTokens; ++t) sum += widen(from[t * dim + d]);
    narrow(sum * (1.0f / kBlockTokens), mean[d]);
    for (int t = 0; t < kBlockTokens; ++t) keys[t * dim + d] = (widen(from[t * dim + d]) - widen(mean[d])) * a.signs[d];
  }
  hadamard(keys, kBlockTokens, dim, kThreads);
  const float norm = 1.0f / sqrtf(static_cast<float>(hadamard_size(dim)));
  for (int t = threadIdx.x / kWarp; t < kBlockTokens; t += kThreads / kWarp) {
    float squares = 0.0f;
    for (int d = threadIdx.x % kWarp; d < dim; d += kWarp) squares += keys[t * dim + d] * keys[t * dim + d];
    squares = warp_sum(squares);
    if (threadIdx.x % kWarp != 0) continue;
    rms[t] = sqrtf(squares / static_cast<float>(dim)) * norm;
    narrow(rms[t], scales[t]);
  }
  __syncthreads();
  const int per_byte = 8 / a.bits;
  for (int i = threadIdx.x; i < kBlockTokens * layout.token_bytes; i += kThreads) {
    const int t = i / layout.token_bytes, first = i % layout.token_bytes * per_byte;
    unsigned byte = 0;
    for (int k = 0; k < per_byte && first + k < dim; ++k)
      byte |= code_of(keys[t * dim + first + k] * norm, rms[t], a.bits) << (k * a.bits);
    to[i] = static_cast<unsigned char>(byte);
  }
}

}  // namespace
}  // namespace etserve::cuda

using namespace etserve::cuda;

extern "C" int64_t etserve_cuda_sketch_bytes(int32_t head_dim, int32_t bits) {
  return SketchLayout(head_dim, bits).num_bytes;
}

extern "C" int etserve_cuda_sketch(const EtserveSketch* args, void* stream) {
  const bool is_valid = args->head_dim >= 8 && args->head_dim <= kMaxSketchDim && args->head_dim % 8 == 0 &&
                        (args->bits == 1 || args->bits == 2) && args->num_kv_heads >= 1 && args->num_kv_heads <= 65535;
  if (!is_valid || args->tokens < 0 || args->tokens > kMaxGrid) return kInvalidValue;
  if (args->tokens == 0) return 0;
  const dim3 grid(static_cast<unsigned>(args->tokens), static_cast<unsigned>(args->num_kv_heads));
  return with_type(args->dtype, [&](auto element) {
    return launch(sketch<decltype(element)>, grid, kThreads, stream, *args);
  });
}
