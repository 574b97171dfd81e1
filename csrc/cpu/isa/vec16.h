// Sixteen floats and what the matrix and element-wise kernels do with them, for each instruction set.
#pragma once
#include <cstdint>
#include <cstring>

#include "convert.h"

#if defined(ETSERVE_ISA_avx512) || defined(ETSERVE_ISA_avx2)
#include <immintrin.h>
#endif

#define ETSERVE_INLINE [[maybe_unused]] static inline __attribute__((always_inline))

namespace etserve::cpu::ETSERVE_ISA {
namespace {

#if defined(ETSERVE_ISA_avx512)

using Vec = __m512;
constexpr int kStreamRows = 4;  // see walk.h
constexpr int kMaxRows2 = 12, kMaxRows4 = 6;  // rows of a tile of 2 and of 4 panels: 24 accumulators of 32 registers

ETSERVE_INLINE Vec vec_set(float v) { return _mm512_set1_ps(v); }
ETSERVE_INLINE Vec vec_load(const float* p) { return _mm512_loadu_ps(p); }
ETSERVE_INLINE void vec_store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
ETSERVE_INLINE Vec vec_add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
ETSERVE_INLINE Vec vec_sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
ETSERVE_INLINE Vec vec_mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
ETSERVE_INLINE Vec vec_div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
ETSERVE_INLINE Vec vec_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand comes through when either is NaN.
ETSERVE_INLINE Vec vec_clamp(Vec v, float low, float high) {
  return _mm512_max_ps(vec_set(low), _mm512_min_ps(vec_set(high), v));
}
// 2^n, where the low bits of `shifted` hold n (see vec_exp).
ETSERVE_INLINE Vec vec_power_of_two(Vec shifted) {
  const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(127 << 23)));
}
struct WeightBf16 {
  __m512i pairs;
};
ETSERVE_INLINE WeightBf16 load_bf16_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
struct PairBf16 {
  __m512i pairs;
};
ETSERVE_INLINE PairBf16 broadcast_pair(const uint16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
ETSERVE_INLINE Vec dot_pairs(Vec acc, WeightBf16 w, PairBf16 x) {
  return _mm512_dpbf16_ps(acc, (__m512bh)w.pairs, (__m512bh)x.pairs);
}
ETSERVE_INLINE Vec load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
ETSERVE_INLINE void store_bf16(uint16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
ETSERVE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

#elif defined(ETSERVE_ISA_avx2)

struct Vec {
  __m256 low, high;
};
constexpr int kStreamRows = 4;
constexpr int kMaxRows2 = 3, kMaxRows4 = 1;  // at most 12 of 16 registers

ETSERVE_INLINE Vec vec_set(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
ETSERVE_INLINE Vec vec_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ETSERVE_INLINE void vec_store(float* p, Vec v) {
  _mm256_storeu_ps(p, v.low);
  _mm256_storeu_ps(p + 8, v.high);
}
ETSERVE_INLINE Vec vec_add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
ETSERVE_INLINE Vec vec_sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
ETSERVE_INLINE Vec vec_mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
ETSERVE_INLINE Vec vec_div(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
ETSERVE_INLINE Vec vec_fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
ETSERVE_INLINE Vec vec_clamp(Vec v, float low, float high) {
  const __m256 l = _mm256_set1_ps(low), h = _mm256_set1_ps(high);
  return {_mm256_max_ps(l, _mm256_min_ps(h, v.low)), _mm256_max_ps(l, _mm256_min_ps(h, v.high))};
}
ETSERVE_INLINE __m256 power_of_two(__m256 shifted) {
  const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(127 << 23)));
}
ETSERVE_INLINE Vec vec_power_of_two(Vec shifted) { return {power_of_two(shifted.low), power_of_two(shifted.high)}; }
ETSERVE_INLINE __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
ETSERVE_INLINE __m256 even_bf16(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
ETSERVE_INLINE __m256 odd_bf16(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
struct WeightBf16 {
  __m256i low, high;
};
ETSERVE_INLINE WeightBf16 load_bf16_pairs(const uint16_t* p) { return {load_256(p), load_256(p + 16)}; }
struct PairBf16 {
  __m256 even, odd;
};
ETSERVE_INLINE PairBf16 broadcast_pair(const uint16_t* p) {
  return {_mm256_set1_ps(from_bf16(p[0])), _mm256_set1_ps(from_bf16(p[1]))};
}
ETSERVE_INLINE Vec dot_pairs(Vec acc, WeightBf16 w, PairBf16 x) {
  acc.low = _mm256_fmadd_ps(even_bf16(w.low), x.even, acc.low);
  acc.high = _mm256_fmadd_ps(even_bf16(w.high), x.even, acc.high);
  acc.low = _mm256_fmadd_ps(odd_bf16(w.low), x.odd, acc.low);
  acc.high = _mm256_fmadd_ps(odd_bf16(w.high), x.odd, acc.high);
  return acc;
}
ETSERVE_INLINE Vec load_f16(const uint16_t* p) {
  const __m256i halves = load_256(p);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
ETSERVE_INLINE void store_bf16(uint16_t* p, Vec v) {
  alignas(32) float lanes[16];
  vec_store(lanes, v);
  for (int i = 0; i < 16; ++i) p[i] = to_bf16(lanes[i]);
}
ETSERVE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

#else  // generic: the compiler's own vectors, split into whatever the target has

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint32_t BitVec __attribute__((vector_size(64)));
constexpr int kStreamRows = 2;
constexpr int kMaxRows2 = 2, kMaxRows4 = 1;

ETSERVE_INLINE Vec vec_set(float v) { return Vec{} + v; }
ETSERVE_INLINE Vec vec_load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
ETSERVE_INLINE void vec_store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
ETSERVE_INLINE Vec vec_add(Vec a, Vec b) { return a + b; }
ETSERVE_INLINE Vec vec_sub(Vec a, Vec b) { return a - b; }
ETSERVE_INLINE Vec vec_mul(Vec a, Vec b) { return a * b; }
ETSERVE_INLINE Vec vec_div(Vec a, Vec b) { return a / b; }
ETSERVE_INLINE Vec vec_fma(Vec a, Vec b, Vec c) { return a * b + c; }  // rounded twice: no contraction
ETSERVE_INLINE Vec vec_clamp(Vec v, float low, float high) {
  const Vec l = vec_set(low), h = vec_set(high);
  v = v > h ? h : v;
  return v < l ? l : v;
}
ETSERVE_INLINE Vec vec_power_of_two(Vec shifted) { return (Vec)(((BitVec)shifted << 23) + (127u << 23)); }
struct WeightBf16 {
  BitVec pairs;
};
ETSERVE_INLINE WeightBf16 load_bf16_pairs(const uint16_t* p) {
  uint32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = p[2 * i] | static_cast<uint32_t>(p[2 * i + 1]) << 16;
  WeightBf16 w;
  std::memcpy(&w.pairs, lanes, sizeof w.pairs);
  return w;
}
struct PairBf16 {
  float even, odd;
};
ETSERVE_INLINE PairBf16 broadcast_pair(const uint16_t* p) { return {from_bf16(p[0]), from_bf16(p[1])}; }
ETSERVE_INLINE Vec dot_pairs(Vec acc, WeightBf16 w, PairBf16 x) {
  acc = vec_fma((Vec)(w.pairs << 16), vec_set(x.even), acc);
  return vec_fma((Vec)(w.pairs & 0xffff0000u), vec_set(x.odd), acc);
}
ETSERVE_INLINE Vec load_f16(const uint16_t* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = from_f16(p[i]);
  return vec_load(lanes);
}
ETSERVE_INLINE void store_bf16(uint16_t* p, Vec v) {
  for (int i = 0; i < 16; ++i) p[i] = to_bf16(v[i]);
}
ETSERVE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

#endif

ETSERVE_INLINE Vec vec_load_part(const float* p, int64_t count) {
  float lanes[16] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * 4);
  return vec_load(lanes);
}

ETSERVE_INLINE void vec_store_part(float* p, Vec v, int64_t count) {
  float lanes[16];
  vec_store(lanes, v);
  std::memcpy(p, lanes, static_cast<size_t>(count) * 4);
}

ETSERVE_INLINE void store_bf16_part(uint16_t* p, Vec v, int64_t count) {
  uint16_t lanes[16];
  store_bf16(lanes, v);
  std::memcpy(p, lanes, static_cast<size_t>(count) * 2);
}

ETSERVE_INLINE float vec_sum(Vec v) {  // in a fixed order
  float lanes[16];
  vec_store(lanes, v);
  float sum = 0.0f;
  for (int i = 0; i < 16; ++i) sum += lanes[i];
  return sum;
}

// e^x for x clamped to +-87 (NaN stays NaN): x = n ln 2 + r, a degree-6 polynomial in r (Cephes expf), scaled by 2^n.
ETSERVE_INLINE Vec vec_exp(Vec x) {
  const Vec magic = vec_set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which lands in the low bits
  x = vec_clamp(x, -87.0f, 87.0f);
  const Vec shifted = vec_fma(x, vec_set(1.44269504088896341f), magic);
  const Vec n = vec_sub(shifted, magic);
  Vec r = vec_fma(n, vec_set(-0.693359375f), x);
  r = vec_fma(n, vec_set(2.12194440e-4f), r);
  Vec p = vec_set(1.9875691500e-4f);
  p = vec_fma(p, r, vec_set(1.3981999507e-3f));
  p = vec_fma(p, r, vec_set(8.3334519073e-3f));
  p = vec_fma(p, r, vec_set(4.1665795894e-2f));
  p = vec_fma(p, r, vec_set(1.6666665459e-1f));
  p = vec_fma(p, r, vec_set(5.0000001201e-1f));
  p = vec_fma(p, vec_mul(r, r), vec_add(r, vec_set(1.0f)));
  return vec_mul(p, vec_power_of_two(shifted));
}

ETSERVE_INLINE Vec vec_silu(Vec x) {
  const Vec e = vec_exp(vec_sub(vec_set(0.0f), x));
  return vec_div(x, vec_add(vec_set(1.0f), e));
}

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
