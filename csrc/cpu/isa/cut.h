// The cut of a truncated distribution: the value down to which likeliest-first order goes until a mass is reached.
#pragma once
#include "row_plan.h"
#include "simd.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

// Everything above `value`, and the first `ties` of those equal to it.
struct Cut {
  float value;
  int64_t ties;
};

struct Uniform {  // xorshift: a pivot that no input can foresee by its order; the result does not depend on it
  uint64_t state = 0x9e3779b97f4a7c15u;
  int64_t below(int64_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<int64_t>(state % static_cast<uint64_t>(n));
  }
};

inline float median(float a, float b, float c) { return larger(smaller(a, b), smaller(larger(a, b), c)); }

// Keys behind the end are NaN, which compares false with everything; weights behind it are 0.
inline F load_keys(const float* keys, int64_t left) {
  return left >= kLanes ? load(keys) : load_below(keys, static_cast<int>(left), kNaN);
}
inline F load_weights(const float* weights, int64_t left) {
  if (weights == nullptr) return set1(1.0f);
  return left >= kLanes ? load(weights) : load_below(weights, static_cast<int>(left), 0.0f);
}

struct Masses {
  double greater = 0.0, equal = 0.0;
  float weight = 0.0f;  // of a key equal to the pivot
};

Masses weigh(const float* keys, const float* weights, int64_t n, float pivot) {
  Masses masses;
  const F bar = set1(pivot);
  F heaviest = zero();
  for (int64_t begin = 0; begin < n; begin += kSampleChunk) {
    F greater = zero(), at_least_bar = zero();
    for (int64_t i = begin; i < smaller(begin + kSampleChunk, n); i += kLanes) {
      const F x = load_keys(keys + i, n - i), w = load_weights(weights ? weights + i : nullptr, n - i);
      const F above = select(less(bar, x), w, zero()), not_below = select(at_least(x, bar), w, zero());
      greater = add(greater, above);
      at_least_bar = add(at_least_bar, not_below);
      heaviest = max(heaviest, sub(not_below, above));
    }
    masses.greater += reduce_add_f64(greater);
    masses.equal += reduce_add_f64(at_least_bar) - reduce_add_f64(greater);
  }
  masses.weight = reduce_max(heaviest);
  return masses;
}

// Keeps, in place, the keys above the pivot or those below it; returns how many.
int64_t narrow(float* keys, float* weights, int64_t n, float pivot, bool above) {
  const F bar = set1(pivot);
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const F x = load_keys(keys + i, n - i), w = load_weights(weights ? weights + i : nullptr, n - i);
    const Mask wanted = above ? less(bar, x) : less(x, bar);
    if (weights) compress_store(weights + kept, wanted, w);
    kept += compress_store(keys + kept, wanted, x);
  }
  return kept;
}

// The highest cut whose mass reaches `need` > 0; weights null: every key weighs 1. Overwrites both arrays.
Cut find_cut(float* keys, float* weights, int64_t n, double need) {
  Uniform pick;
  double above = 0.0;
  while (n > 0) {
    const float pivot = median(keys[pick.below(n)], keys[pick.below(n)], keys[pick.below(n)]);
    const Masses masses = weigh(keys, weights, n, pivot);
    const bool is_above = above + masses.greater >= need;
    if (!is_above && above + masses.greater + masses.equal >= need) {
      above += masses.greater;
      int64_t ties = 1;
      while (above + static_cast<double>(ties) * masses.weight < need && ties < n) ++ties;
      return {pivot, ties};
    }
    if (!is_above) above += masses.greater + masses.equal;
    n = narrow(keys, weights, n, pivot, is_above);
  }
  return {-kInf, 0};  // rounding left the whole a hair below `need`: all stay
}

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
