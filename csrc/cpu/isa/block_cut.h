// The rule that decides which blocks are skipped: from the smallest mass while the sum stays within a budget, ties by
// index. Masses are whole numbers of 2^-30, so that sums are exact; a key is such a number as the bits of a float, which
// ascend with it. Radix selection finds where to cut in a few passes, without a sort.
#pragma once
#include <cstdint>
#include <cstring>

#include "convert.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

constexpr float kMassUnits = 1073741824.0f;  // 2^30

// Skipped are the keys below `key` and, in order of index, the first `num_equal` of those that equal it.
struct Cut {
  uint32_t key = 0;
  int num_equal = 0;
  uint64_t sum = 0;  // of what is skipped
};

class CutFinder {
 public:
  // `keys` [count] is overwritten.
  Cut find(uint32_t* keys, int count, uint64_t budget, int max_count) {
    budget_ = budget;
    left_ = max_count;
    cut_ = {};
    constexpr int kShifts[] = {20, 12, 4, 0};
    uint32_t prefix = 0;
    for (int level = 0; level < 4; ++level) {
      const int shift = kShifts[level], width = level == 0 ? 32 : kShifts[level - 1] - shift;
      const int bucket = pass(keys, count, shift, width);
      if (bucket < 0) {  // all go; possible at the first level only
        cut_.key = UINT32_MAX;
        return cut_;
      }
      count = keep_bucket(keys, count, shift, width, bucket);
      prefix = keys[0] >> shift << shift;
    }
    cut_.key = prefix;
    const uint64_t mass = value(prefix);
    cut_.num_equal = count < left_ ? count : left_;
    if (mass > 0 && static_cast<uint64_t>(cut_.num_equal) > (budget_ - cut_.sum) / mass)
      cut_.num_equal = static_cast<int>((budget_ - cut_.sum) / mass);
    cut_.sum += mass * static_cast<uint64_t>(cut_.num_equal);
    return cut_;
  }

  static uint64_t value(uint32_t key) { return static_cast<uint64_t>(bits_to_float(key)); }

 private:
  static int bucket_of(uint32_t key, int shift, int width) {
    if (width == 32) return key == 0 ? 0 : static_cast<int>(key >> shift) - kFirst;  // 0, or 1 .. 2^32 in eighths of octaves
    return static_cast<int>(key >> shift & ((1u << width) - 1u));
  }

  // Adds whole buckets from the lowest while they fit; returns the first that does not, -1 if there is none.
  int pass(const uint32_t* keys, int count, int shift, int width) {
    std::memset(counts_, 0, sizeof counts_);
    std::memset(sums_, 0, sizeof sums_);
    for (int i = 0; i < count; ++i) {
      const int bucket = bucket_of(keys[i], shift, width);
      ++counts_[bucket];
      sums_[bucket] += value(keys[i]);
    }
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      if (counts_[bucket] > left_ || (counts_[bucket] > 0 && sums_[bucket] > budget_ - cut_.sum)) return bucket;
      left_ -= counts_[bucket];
      cut_.sum += sums_[bucket];
    }
    return -1;
  }

  static int keep_bucket(uint32_t* keys, int count, int shift, int width, int bucket) {
    int kept = 0;
    for (int i = 0; i < count; ++i)
      if (bucket_of(keys[i], shift, width) == bucket) keys[kept++] = keys[i];
    return kept;
  }

  static constexpr int kFirst = 127 * 8 - 1, kBuckets = 264;
  uint64_t budget_ = 0, sums_[kBuckets];
  int left_ = 0, counts_[kBuckets];
  Cut cut_;
};

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
