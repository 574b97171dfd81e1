// RMSNorm, SiLU * mul, and the rotary embedding with its write into the paged cache. f32 inside.
#include "device.h"

namespace etserve::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadThreads = 128;
constexpr int kMaxHeadDim = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) normalise(EtserveRmsNorm a) {
  const T* x = static_cast<const T*>(a.x) + blockIdx.x * a.size;
  const T* weight = static_cast<const T*>(a.weight);
  T* out = static_cast<T*>(a.out) + blockIdx.x * a.size;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < a.size; i += kThreads) squares += widen(x[i]) * widen(x[i]);
  const float mean = block_sum<kThreads>(squares) / static_cast<float>(a.size);
  const float scale = 1.0f / sqrtf(mean + a.eps);
  for (int64_t i = threadIdx.x; i < a.size; i += kThreads) narrow(widen(x[i]) * scale * widen(weight[i]), out[i]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) gate_up(EtserveSiluMul a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.rows * a.size) return;
  const int64_t at = i / a.size * a.stride + i % a.size;
  const float gate = widen(static_cast<const T*>(a.gate)[at]), up = widen(static_cast<const T*>(a.up)[at]);
  narrow(gate / (1.0f + expf(-gate)) * up, static_cast<T*>(a.out)[i]);
}

// Where head `head` of q, k and v in turn goes; null where the token has no slot.
template <class T>
__device__ T* destination(const EtserveRope& a, int64_t token, int head) {
  if (head < a.num_heads) return static_cast<T*>(a.q) + (token * a.num_heads + head) * a.head_dim;
  const int64_t slot = a.slots[token], block = slot / kBlockTokens, offset = slot % kBlockTokens;
  if (slot < 0) return nullptr;
  const int other = head - a.num_heads, is_value = other >= a.num_kv_heads ? 1 : 0;
  const int kv_head = other - is_value * a.num_kv_heads;
  const int64_t row = (block * 2 + is_value) * a.num_kv_heads + kv_head;
  return static_cast<T*>(a.kv) + (row * kBlockTokens + offset) * a.head_dim;
}

// One block of threads per token, one warp per head in turn. A warp's head lies in its own stretch of shared memory.
template <class T>
__global__ void __launch_bounds__(kHeadThreads) rotate(EtserveRope a) {
  ETSERVE_SHARED(float, heads, kHeadThreads / kWarp * kMaxHeadDim);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, half = a.rotary_dim / 2;
  const int64_t token = blockIdx.x, position = a.positions[token];
  const int num_rows = a.num_heads + 2 * a.num_kv_heads, dim = a.head_dim;
  float* x = heads + warp * kMaxHeadDim;
  for (int head = warp; head < num_rows; head += kHeadThreads / kWarp) {
    const T* from = static_cast<const T*>(a.qkv) + (token * num_rows + head) * dim;
    T* to = destination<T>(a, token, head);
    const bool is_query = head < a.num_heads, is_value = head >= a.num_heads + a.num_kv_heads;
    const T* weight = static_cast<const T*>(is_value ? nullptr : is_query ? a.q_norm : a.k_norm);
    float squares = 0.0f;
    for (int i = lane; i < dim; i += kWarp) squares += widen(from[i]) * widen(from[i]);
    const float scale = weight ? 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(dim) + a.eps) : 1.0f;
    for (int i = lane; i < dim; i += kWarp) x[i] = widen(from[i]) * scale * (weight ? widen(weight[i]) : 1.0f);
    __syncwarp();
    for (int i = lane; to != nullptr && i < dim; i += kWarp) {
      float value = x[i];
      if (!is_value && i < 2 * half) {
        const int64_t angle = position * half + i % half;
        const float other = i < half ? -x[i + half] : x[i - half];
        value = value * a.cos[angle] + other * a.sin[angle];
      }
      narrow(value, to[i]);
    }
    __syncwarp();  // before the next head overwrites this one
  }
}

}  // namespace
}  // namespace etserve::cuda

using namespace etserve::cuda;

extern "C" int etserve_cuda_rms_norm(const EtserveRmsNorm* args, void* stream) {
  if (args->rows < 0 || args->rows > kMaxGrid || args->size < 1) return kInvalidValue;
  if (args->rows == 0) return 0;
  return with_type(args->dtype, [&](auto element) {
    using T = decltype(element);
    return launch(normalise<T>, dim3(static_cast<unsigned>(args->rows)), kThreads, stream, *args);
  });
}

extern "C" int etserve_cuda_silu_mul(const EtserveSiluMul* args, void* stream) {
  if (args->rows < 0 || args->size < 1 || args->rows > kMaxGrid * kThreads / args->size) return kInvalidValue;
  const int64_t blocks = ceil_div(args->rows * args->size, kThreads);
  if (blocks == 0) return 0;
  return with_type(args->dtype, [&](auto element) {
    using T = decltype(element);
    return launch(gate_up<T>, dim3(static_cast<unsigned>(blocks)), kThreads, stream, *args);
  });
}

extern "C" int etserve_cuda_rope_and_write(const EtserveRope* args, void* stream) {
  const bool is_valid = args->head_dim >= 2 && args->head_dim <= kMaxHeadDim && args->head_dim % 2 == 0 &&
                        args->rotary_dim >= 0 && args->rotary_dim <= args->head_dim && args->rotary_dim % 2 == 0 &&
                        (args->q_norm == nullptr) == (args->k_norm == nullptr);
  if (!is_valid || args->tokens < 0 || args->tokens > kMaxGrid) return kInvalidValue;
  if (args->tokens == 0) return 0;
  return with_type(args->dtype, [&](auto element) {
    using T = decltype(element);
    return launch(rotate<T>, dim3(static_cast<unsigned>(args->tokens)), kHeadThreads, stream, *args);
  });
}
