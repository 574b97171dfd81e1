// Sizes that the sketch and selection kernels and their callers share.
//
// A block's sketch for one KV head, from a cache line's start:
//   codes   [lines][64 bytes]: byte 4 t + j of line l holds, in its k-th field of `bits` bits, token t's code of
//           dimension l * dims_per_line + 4 k + j. One shift and one table look-up then give 16 tokens x 4 dimensions as
//           the bytes that vpdpbusd multiplies.
//   mean    bf16 [padded_dim]: of the block's keys, not rotated
//   scales  bf16 [16]: rms of each token's rotated difference from the mean
#pragma once
#include <cstdint>

#include "kernels.h"

namespace etserve::cpu {
namespace {

// Levels in whole numbers, so that products are exact: +-57 and +-17 of 1/37.76 are +-1.51 and +-0.45 of the rms (2
// bits, Lloyd-Max), +-57 of 1/71.44 is +-0.798 (1 bit). Codes stand for level + 64, which is below 128: two products with
// a signed byte still fit 16 bits.
constexpr int kLevelOffset = 64, kOuterLevel = 57, kInnerLevel = 17;
constexpr float kLevelUnit2 = 1.0f / 37.76f, kLevelUnit1 = 1.0f / 71.44f;
constexpr float kOuterThreshold = 0.98f;  // of the rms: where the outer level of 2 bits begins
constexpr int kChunkBlocks = 16;          // estimated masses have one shift per chunk of so many blocks
constexpr int kSpanChunks = 16;           // one thread's piece of a scan

struct SketchLayout {
  int bits, head_dim;
  int dims_per_line, lines, padded_dim;
  int64_t mean_at, scales_at, num_bytes;

  SketchLayout(int head_dim_, int bits_) : bits(bits_), head_dim(head_dim_) {
    dims_per_line = 32 / bits;
    lines = (head_dim + dims_per_line - 1) / dims_per_line;
    padded_dim = (head_dim + 15) / 16 * 16;
    mean_at = int64_t{lines} * 64;
    scales_at = mean_at + 2 * padded_dim;
    num_bytes = (scales_at + 2 * kBlockSize + 63) / 64 * 64;
  }
  int query_dims() const { return lines * dims_per_line; }
};

// All counts in floats (or 32-bit whole numbers).
struct SelectionScratch {
  int64_t blocks, chunks;  // per sequence, whole chunks
  int64_t sums;            // [num_seqs][num_heads][blocks]: sum of 2^(score - the chunk's maximum) per block
  int64_t maxima;          // [num_seqs][num_heads][chunks]
  int64_t lists;           // [num_seqs][num_kv_heads][blocks]
  int64_t counts;          // [num_seqs][num_kv_heads]
  int64_t per_thread;      // keys and work of the cut, [blocks] and [blocks + 16]; factors, [chunks]

  SelectionScratch(int64_t num_seqs, int64_t max_context, int64_t num_heads, int64_t num_kv_heads) {
    chunks = (max_context + kBlockSize * kChunkBlocks - 1) / (kBlockSize * kChunkBlocks);
    blocks = chunks * kChunkBlocks;
    sums = num_seqs * num_heads * blocks;
    maxima = (num_seqs * num_heads * chunks + 15) / 16 * 16;
    lists = num_seqs * num_kv_heads * blocks;
    counts = (num_seqs * num_kv_heads + 15) / 16 * 16;
    per_thread = 2 * blocks + 16 + (chunks + 15) / 16 * 16;
  }
  int64_t total(int64_t team) const { return 16 + sums + maxima + 2 * lists + counts + team * per_thread; }
};

}  // namespace
}  // namespace etserve::cpu
