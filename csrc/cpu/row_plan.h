// Sizes that the row kernels and their callers share.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace etserve::cpu {
namespace {

constexpr int64_t kRowTile = 4096;  // entries per partial result of the row pass: 16 KB, half of the first cache
constexpr int kMaxTop = 64;

struct RowPartial {  // of one tile, relative to its own maximum
  float maximum, z, s1, s2;
  int32_t nonfinite;
};
struct TopList {  // of one chunk of tiles; descending, ties by lower id
  int32_t count;
  float values[kMaxTop];
  int32_t ids[kMaxTop];
};

inline int64_t row_tiles(int64_t vocab) { return (vocab + kRowTile - 1) / kRowTile; }

// A row is cut into chunks only where there are too few rows to keep everyone busy. Results do not depend on it.
inline int64_t row_chunks(int64_t rows, int64_t vocab, int team_size) {
  const int64_t wanted = rows >= 2 * team_size ? 1 : (2 * team_size + rows - 1) / (rows > 0 ? rows : 1);
  return wanted < row_tiles(vocab) ? wanted : row_tiles(vocab);
}

constexpr int64_t kSampleChunk = 256;  // entries per partial sum of the sampler

// One thread's arrays, in floats: keys, weights, ids and two work arrays of [vocab + 16], maxima [16 per chunk],
// sums [chunks] doubles.
struct SampleScratch {
  int64_t chunks, entries, per_thread;
  explicit SampleScratch(int64_t vocab)
      : chunks((vocab + kSampleChunk - 1) / kSampleChunk),
        entries((vocab + 16 + 15) / 16 * 16),
        per_thread(5 * entries + 32 * chunks + (2 * chunks + 15) / 16 * 16) {}
};

}  // namespace
}  // namespace etserve::cpu
