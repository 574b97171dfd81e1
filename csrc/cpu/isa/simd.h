// Sixteen float lanes (F) for the row kernels, in the instruction set this unit is compiled for.
//
// Rounding order is part of the contract: every operation is an explicit intrinsic (or a plain loop), nothing is left to
// reassociation. All names live in the unit's own namespace, so that no unit can link to another's code.
//
//   zero() set1(x) load(p) store(p, a) add sub mul fma(a, b, c) = a * b + c
//   max(a, b), min(a, b): b where either is NaN
//   less(a, b), at_least(a, b): Mask, false where either is NaN;  bits(mask), from_bits;  select(mask, yes, no);  lanes_below(n)
//   reduce_add, reduce_max: one fixed tree
//   reduce_add_f64; compress_store, compress_ids: the lanes under a mask to the front of an array that takes 16 more
//   exp_negative(x), x <= 0 or NaN: within 2 ulp, 0 below about -87.3 (avx512: below -104), -inf gives 0, NaN gives NaN
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "convert.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

namespace etserve::cpu::ETSERVE_ISA {
namespace {

constexpr int kLanes = 16;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <class T>
inline T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T larger(T a, T b) {
  return a < b ? b : a;
}
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Cephes' expf: exp(x) = 2^n * P(x - n ln 2), ln 2 in two parts, P of degree 6 on |r| <= ln 2 / 2.
inline F exp_negative(F x) {
  x = max(set1(kExpLowest), x);  // this order lets NaN through
  const F n = round_nearest(mul(x, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return scale_by_power(p, n, x);
}

inline float exp_negative(float x) {
  float lanes[kLanes];
  store(lanes, exp_negative(set1(x)));
  return lanes[0];
}

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
