// What all kernels share: element types, reductions over warps and blocks, the launch. Written once for nvcc and for
// the emulator.
#pragma once
#include <cstdint>

#include "etserve_cuda.h"
#ifdef ETSERVE_EMULATE
#include "emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define ETSERVE_SHARED(type, name, count) __shared__ type name[count]
#endif

namespace etserve::cuda {

using Count = unsigned long long;  // what CUDA's 64-bit atomics take

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kBlockTokens = 16;
constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue
constexpr int64_t kMaxVocab = int64_t{1} << 20;
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float nan() { return __uint_as_float(0x7fc00000u); }

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(Bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
#ifdef ETSERVE_EMULATE
inline float widen(F16 x) {
  const unsigned sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 0x3ffu;
  if (exponent == 0) return std::copysign(std::ldexp(static_cast<float>(mantissa), -24), __uint_as_float(sign | 0x3f800000u));
  return __uint_as_float(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}
inline void narrow(float x, Bf16& out) {
  const unsigned bits = __float_as_uint(x);
  out.bits = static_cast<uint16_t>(x != x ? 0x7fff : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void narrow(float x, F16& out) {
  const unsigned sign = (__float_as_uint(x) >> 16) & 0x8000u;
  const float size = std::fabs(x);
  unsigned bits;
  if (x != x) {
    bits = 0x7fffu;
  } else if (size >= 65520.0f) {
    bits = 0x7c00u;
  } else if (size < 6.103515625e-5f) {  // 2^-14: subnormal in steps of 2^-24
    bits = static_cast<unsigned>(std::nearbyint(std::ldexp(size, 24)));
  } else {
    const unsigned wide = __float_as_uint(size);
    bits = (wide - (112u << 23) + 0xfffu + ((wide >> 13) & 1u)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | bits);
}
#else
__device__ __forceinline__ float widen(F16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ __forceinline__ void narrow(float x, Bf16& out) { out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
__device__ __forceinline__ void narrow(float x, F16& out) { out.bits = __half_as_ushort(__float2half_rn(x)); }
#endif
__device__ __forceinline__ void narrow(float x, float& out) { out = x; }

// Eight neighbours in one access (two for f32).
template <class T>
struct alignas(16) Eight {
  T at[8];
};

template <class T>
__device__ __forceinline__ bool is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// Order of values as order of unsigned integers; -0 and 0 are equal, as they are for a sort. Not for NaN.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The same bits in every lane: a butterfly adds the same pairs on both sides.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int other = kWarp / 2; other > 0; other /= 2) value += __shfl_xor_sync(kAllLanes, value, other);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
  for (int other = kWarp / 2; other > 0; other /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, other));
  return value;
}
template <class T>
__device__ __forceinline__ T warp_inclusive_scan(T value) {
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const T below = __shfl_up_sync(kAllLanes, value, static_cast<unsigned>(delta));
    if (static_cast<int>(threadIdx.x) % kWarp >= delta) value += below;
  }
  return value;
}

// Of kThreads threads, all of which call; every thread gets the result.
template <int kThreads, class T>
__device__ T block_sum(T value) {
  ETSERVE_SHARED(T, parts, kThreads / kWarp);
  value = warp_sum(value);
  __syncthreads();  // the last call's results are read
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  T total = parts[0];
  for (int w = 1; w < kThreads / kWarp; ++w) total += parts[w];
  return total;
}
template <int kThreads>
__device__ float block_max(float value) {
  ETSERVE_SHARED(float, parts, kThreads / kWarp);
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  float top = parts[0];
  for (int w = 1; w < kThreads / kWarp; ++w) top = fmaxf(top, parts[w]);
  return top;
}

// Sum of the values of the threads up to and with this one, and of all.
template <int kThreads, class T>
__device__ T block_scan(T value, T& total) {
  ETSERVE_SHARED(T, parts, kThreads / kWarp);
  const T within = warp_inclusive_scan(value);
  __syncthreads();  // the last call's results are read
  if (threadIdx.x % kWarp == kWarp - 1) parts[threadIdx.x / kWarp] = within;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int w = 0; w < kThreads / kWarp; ++w) {
    if (w < static_cast<int>(threadIdx.x) / kWarp) before += parts[w];
    total += parts[w];
  }
  return before + within;
}

#ifdef ETSERVE_EMULATE
template <class... Wanted, class... Given>
int launch(void (*kernel)(Wanted...), dim3 grid, unsigned threads, void*, Given... given) {
  emulation::run(grid, threads, [=] { kernel(given...); });
  return 0;
}
#else
template <class... Wanted, class... Given>
int launch(void (*kernel)(Wanted...), dim3 grid, unsigned threads, void* stream, Given... given) {
  kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(given...);
  return static_cast<int>(cudaGetLastError());
}
#endif

// Calls with a value of the element type that `dtype` names.
template <class Call>
int with_type(int dtype, Call call) {
  switch (dtype) {
    case ETSERVE_F32: return call(float{});
    case ETSERVE_BF16: return call(Bf16{});
    case ETSERVE_F16: return call(F16{});
    default: return kInvalidValue;
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace etserve::cuda
