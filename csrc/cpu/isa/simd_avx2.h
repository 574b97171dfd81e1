// AVX2 + FMA: two ymm registers.
#pragma once
#include <immintrin.h>

#include <cstring>

namespace etserve::cpu::ETSERVE_ISA {
namespace {

struct F {
  __m256 a, b;
};
struct Mask {
  __m256 a, b;
};

constexpr float kExpLowest = -88.0f;

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Mask less(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
inline Mask at_least(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)}; }
inline Mask lanes_below(int n) {
  const __m256i count = _mm256_set1_epi32(n);
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, low)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, high))};
}
inline uint32_t bits(Mask m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a)) | static_cast<uint32_t>(_mm256_movemask_ps(m.b)) << 8;
}
inline Mask from_bits(uint32_t m) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i low = _mm256_and_si256(lane, _mm256_set1_epi32(static_cast<int>(m & 0xff)));
  const __m256i high = _mm256_and_si256(lane, _mm256_set1_epi32(static_cast<int>(m >> 8 & 0xff)));
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(low, lane)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(high, lane))};
}
inline F select(Mask m, F yes, F no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }
inline F load_below(const float* p, int n, float fill) {  // lanes >= n are not read
  const Mask m = lanes_below(n);
  const F x = {_mm256_maskload_ps(p, _mm256_castps_si256(m.a)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.b))};
  return select(m, x, set1(fill));
}
inline float reduce_add(F x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  q = _mm_add_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
inline float reduce_max(F x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  q = _mm_max_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
inline F round_nearest(F x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
inline __m256 half_power(__m256 n) {  // 2^n, n >= -126
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F scale_by_power(F p, F n, F x) {
  n = max(set1(-126.0f), n);
  const F scaled = {_mm256_mul_ps(p.a, half_power(n.a)), _mm256_mul_ps(p.b, half_power(n.b))};
  return select(less(x, set1(-87.3f)), zero(), scaled);
}
inline double reduce_add_f64(F x) {
  const __m256d low = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x.a)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)));
  const __m256d high = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x.b)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1)));
  double lanes[4];
  _mm256_storeu_pd(lanes, _mm256_add_pd(low, high));
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}
inline int compress_store(float* p, Mask m, F x) {
  float lanes[16];
  store(lanes, x);
  int count = 0;
  for (uint32_t left = bits(m); left != 0; left &= left - 1)
    std::memcpy(p + count++, lanes + __builtin_ctz(left), 4);  // p may hold integers
  return count;
}

inline int compress_ids(int32_t* p, Mask m, int32_t first) {
  int count = 0;
  for (uint32_t left = bits(m); left != 0; left &= left - 1) p[count++] = first + __builtin_ctz(left);
  return count;
}

// bf16 cache, f32 operands: an element is the upper half of a float.
struct Bf16Dot {
  struct Operand {
    float even, odd;
  };
  static constexpr int kStep = 2;
  struct Loaded {
    F even, odd;
  };
  struct Spread {
    F even, odd;
  };
  static Loaded load16(const uint32_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(x, upper)), _mm256_castsi256_ps(_mm256_and_si256(y, upper))}};
  }
  static Spread spread(const Operand* b) { return {set1(b->even), set1(b->odd)}; }
  static F dot(F acc, Loaded a, Spread b) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }
  static void pack16(Operand* to, F a) { store(&to->even, a); }
};

constexpr int kScoreRows = 4;  // of the 16 registers 8 accumulate
constexpr int score_blocks(int /*rows*/) { return 1; }
constexpr int kValueRows = 4;
constexpr int kValueVectors = 1;

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
