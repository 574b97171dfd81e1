// AVX-512 (F, BW, VL, DQ, BF16): one zmm register.
#pragma once
#include <immintrin.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 says so of its own intrinsics (bug 105593)
#endif

namespace etserve::cpu::ETSERVE_ISA {
namespace {

struct F {
  __m512 v;
};
using Mask = __mmask16;

constexpr float kExpLowest = -104.0f;  // exp rounds to 0

inline F zero() { return {_mm512_setzero_ps()}; }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Mask less(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline Mask at_least(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline Mask lanes_below(int n) { return static_cast<Mask>(n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1u); }
inline uint32_t bits(Mask m) { return m; }
inline Mask from_bits(uint32_t m) { return static_cast<Mask>(m); }
inline F select(Mask m, F yes, F no) { return {_mm512_mask_blend_ps(m, no.v, yes.v)}; }
inline F load_below(const float* p, int n, float fill) {  // lanes >= n are not read
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), lanes_below(n), p)};
}
inline float reduce_add(F a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  q = _mm_add_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
inline float reduce_max(F a) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  q = _mm_max_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
inline F round_nearest(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F scale_by_power(F p, F n, F /*x*/) { return {_mm512_scalef_ps(p.v, n.v)}; }
inline double reduce_add_f64(F a) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a.v));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1));
  return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}
// Writes the lanes of `a` under the mask to the front of p (which must take 16), returns their number.
inline int compress_store(float* p, Mask m, F a) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(m, a.v));  // the register form: the memory form is microcoded on Zen
  return __builtin_popcount(m);
}

inline int compress_ids(int32_t* p, Mask m, int32_t first) {  // first + lane, the same way
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(m, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
  return __builtin_popcount(m);
}

// Products of pairs along the reduced axis: bf16 cache, operand pairs rounded to bf16, f32 accumulation.
struct Bf16Dot {
  using Operand = uint32_t;  // two bf16
  static constexpr int kStep = 2;
  using Loaded = __m512bh;
  using Spread = __m512bh;
  static Loaded load16(const uint32_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Spread spread(const Operand* b) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(*b)); }
  static F dot(F acc, Loaded a, Spread b) { return {_mm512_dpbf16_ps(acc.v, a, b)}; }
  static void pack16(Operand* to, F a) {  // 16 f32 along the reduced axis -> 8 operands
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(a.v));
  }
};

constexpr int kScoreRows = 12;  // rows x key blocks: 12 x 2 or 6 x 4 accumulators of the 32 registers
constexpr int score_blocks(int rows) { return rows <= 6 ? 4 : 2; }
constexpr int kValueRows = 6;  // rows x dims / 16: 6 x 4 accumulators
constexpr int kValueVectors = 4;

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
