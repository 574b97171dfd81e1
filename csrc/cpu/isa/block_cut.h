// The rule that decides which blocks are skipped: from the smallest mass while the sum stays within a budget, ties by
// index. Masses are whole numbers of 2^-30, at most 2^30, so that their sums are exact in doubles, whatever the order.
// Pivots find where to cut in a few vector passes over ever fewer keys, without a sort.
#pragma once
#include <cstdint>

#include "simd.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

constexpr float kMassUnits = 1073741824.0f;  // 2^30

// Skipped are the keys below `key` and, in order of index, the first `num_equal` of those that equal it.
struct Cut {
  float key = kInf;
  int num_equal = 0;
  double sum = 0.0;  // of what is skipped
};

class CutFinder {
 public:
  // `keys` [count], finite, is overwritten, and must take 16 more.
  Cut find(float* keys, int count, double budget, int max_count) {
    Cut cut;
    while (count > 0) {
      const float pivot = median(keys[draw(count)], keys[draw(count)], keys[draw(count)]);
      const Below below = weigh(keys, count, pivot);
      if (below.num_less > max_count || cut.sum + below.sum > budget) {
        count = narrow(keys, count, pivot, false);
        continue;
      }
      const int num_equal = affordable(below.num_equal, pivot, budget - cut.sum - below.sum, max_count - below.num_less);
      cut.sum += below.sum + static_cast<double>(pivot) * num_equal;
      if (num_equal < below.num_equal) {
        cut.key = pivot;
        cut.num_equal = num_equal;
        return cut;
      }
      max_count -= below.num_less + num_equal;
      count = narrow(keys, count, pivot, true);
    }
    return cut;  // all go
  }

 private:
  struct Below {
    double sum = 0.0;
    int num_less = 0, num_equal = 0;
  };

  static float median(float a, float b, float c) { return larger(smaller(a, b), smaller(larger(a, b), c)); }

  static int affordable(int count, float key, double budget, int max_count) {
    const int fitting = smaller(count, max_count);
    if (static_cast<double>(key) * fitting <= budget) return fitting;
    return static_cast<int>(budget / static_cast<double>(key));
  }

  static Below weigh(const float* keys, int count, float pivot) {
    Below below;
    const F bar = set1(pivot);
    for (int i = 0; i < count; i += kLanes) {
      const F x = load_below(keys + i, count - i, kInf);
      const Mask is_less = less(x, bar);
      below.num_less += __builtin_popcount(bits(is_less));
      below.num_equal += __builtin_popcount(bits(at_least(bar, x)) & ~bits(is_less));
      below.sum += reduce_add_f64(select(is_less, x, zero()));
    }
    return below;
  }

  // Keeps the keys above the pivot, or those below it; returns how many.
  static int narrow(float* keys, int count, float pivot, bool above) {
    int kept = 0;
    const F bar = set1(pivot);
    for (int i = 0; i < count; i += kLanes) {
      const F x = load_below(keys + i, count - i, kNaN);
      kept += compress_store(keys + kept, above ? less(bar, x) : less(x, bar), x);
    }
    return kept;
  }

  // A place that no order of keys can foresee; the cut does not depend on it.
  int draw(int count) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int>((state_ >> 33) % static_cast<uint64_t>(count));
  }

  uint64_t state_ = 1;
};

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
