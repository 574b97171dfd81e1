// CUDA's device side for g++: the kernels' own source, one fiber per CUDA thread, blocks one after another.
//
// What it is for: running the logic of csrc/cuda on a machine without a GPU, in an order that a seed chooses, so that a
// missing barrier, a divergent one, an absent lane or unwritten shared memory shows. Fibers switch at barriers and warp
// operations only. Not modelled: speed, races between blocks, memory order, asynchronous copies. A misuse ends the process and says where.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs

namespace etserve::emulation {

using Place = std::source_location;  // in the kernel's source

void run(dim3 grid, unsigned threads, const std::function<void()>& kernel);
void set_seed(uint64_t seed);
// All 32 lanes meet at one place and see what each brought; valid until the warp's next meeting.
const uint64_t* meet_warp(unsigned mask, uint64_t mine, Place place);
// All threads of the block meet; the sum of what they brought.
int meet_block(int mine, Place place);
// One array per declaration and block, filled with 0xff (NaN, -1) when the block starts, guarded at its end.
void* shared_array(const void* site, size_t bytes);
int lane();

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace etserve::emulation

#define ETSERVE_SHARED(type, name, count) \
  static const char name##_site = 0;      \
  type* const name = static_cast<type*>(::etserve::emulation::shared_array(&name##_site, sizeof(type) * (count)))
#define ETSERVE_HERE std::source_location::current()

inline void __syncthreads(etserve::emulation::Place at = ETSERVE_HERE) { etserve::emulation::meet_block(0, at); }
inline int __syncthreads_count(bool predicate, etserve::emulation::Place at = ETSERVE_HERE) {
  return etserve::emulation::meet_block(predicate ? 1 : 0, at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other, etserve::emulation::Place at = ETSERVE_HERE) {
  namespace e = etserve::emulation;
  return e::from_bits<T>(e::meet_warp(mask, e::to_bits(value), at)[(e::lane() ^ other) & 31]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, etserve::emulation::Place at = ETSERVE_HERE) {
  namespace e = etserve::emulation;
  const int from = e::lane() - static_cast<int>(delta);
  return e::from_bits<T>(e::meet_warp(mask, e::to_bits(value), at)[from < 0 ? e::lane() : from]);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from, etserve::emulation::Place at = ETSERVE_HERE) {
  namespace e = etserve::emulation;
  return e::from_bits<T>(e::meet_warp(mask, e::to_bits(value), at)[from & 31]);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate, etserve::emulation::Place at = ETSERVE_HERE) {
  const uint64_t* all = etserve::emulation::meet_warp(mask, predicate ? 1 : 0, at);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}
template <class T>
T atomicAdd(T* where, T value) {
  const T before = *where;
  *where += value;
  return before;
}
inline int __float2int_rn(float x) { return static_cast<int>(std::lrint(x)); }
inline int __dp4a(int a, int b, int sum) {
  for (int shift = 0; shift < 32; shift += 8)
    sum += static_cast<int8_t>(a >> shift) * static_cast<int8_t>(b >> shift);
  return sum;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return out;
}
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline float __expf(float x) { return std::exp(x); }
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(etserve::emulation::to_bits(x)); }
inline float __uint_as_float(unsigned x) { return etserve::emulation::from_bits<float>(x); }
inline unsigned long long __float2ull_rn(float x) { return static_cast<unsigned long long>(std::llrint(x)); }
inline void __syncwarp(unsigned mask = 0xffffffffu, etserve::emulation::Place at = ETSERVE_HERE) {
  etserve::emulation::meet_warp(mask, 0, at);
}
