// Sizes that the attention kernel and its callers share: tiles, partitions and the layout of scratch.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace etserve::cpu {
namespace {

constexpr int kTileBlocks = 8;                          // blocks per softmax tile: the running maximum moves once per tile
constexpr int kTileTokens = kTileBlocks * kBlockSize;   // 128
constexpr int kTilesPerPartition = kPartitionTokens / kTileTokens;
constexpr int kTileRows = 48;        // query rows (token x head of the group) that share each loaded block
constexpr int kMaxSplitTokens = 8;   // a sequence with so few new tokens hands its partitions to different threads

inline int64_t plan_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// All counts in floats; every region a multiple of 16 of them.
struct AttentionScratch {
  int64_t padded_dim;      // head_dim rounded up to 16
  int64_t scores, weights, queries, partial, merged, sums, values;  // one thread's regions
  int64_t per_thread;
  int64_t max_tiles;       // per sequence
  int64_t tile_maxima;     // [num_seqs][num_heads][max_tiles]
  int64_t partial_row;     // of one (query row, partition): o [padded_dim], m, l, padding

  AttentionScratch(int64_t num_seqs, int64_t max_context, int64_t num_heads, int64_t head_dim) {
    padded_dim = plan_ceil(head_dim, 16) * 16;
    scores = kTileRows * kTileTokens;
    weights = kTileRows * kTileTokens;
    queries = kTileRows * padded_dim;
    partial = kTileRows * padded_dim;
    merged = kTileRows * padded_dim;
    sums = kTileRows * 16;
    values = kTileTokens * padded_dim;
    per_thread = scores + weights + queries + partial + merged + sums + values;
    max_tiles = plan_ceil(max_context, kTileTokens);
    tile_maxima = plan_ceil(num_seqs * num_heads * max_tiles, 16) * 16;
    partial_row = padded_dim + 16;
  }

  int64_t total(int64_t num_tokens, int64_t num_seqs, int64_t max_context, int64_t num_heads, int64_t team) const {
    const int64_t split_tokens = num_tokens < num_seqs * kMaxSplitTokens ? num_tokens : num_seqs * kMaxSplitTokens;
    const int64_t partitions = plan_ceil(max_context, kPartitionTokens);
    return 16 + team * per_thread + tile_maxima + split_tokens * num_heads * partitions * partial_row;
  }
};

}  // namespace
}  // namespace etserve::cpu
