// Quantised weights, in ggml's formats, repacked once for the kernels. A block is 32 weights along K:
//   q8_0  w = d * q          q in -128 .. 127    d in f16
//   q4_0  w = d * (q - 8)    q in 0 .. 15
//   q4_1  w = d * q + m      q in 0 .. 15        d and m in f16
//
// A panel of 16 outputs is a row of records of two blocks, whole cache lines that stream by:
//   d     f16 [block 2][lane 16]
//   m     f16 [block 2][lane 16]                  q4_1 only
//   q8_0  u8  [block 2][8][lane 16][4]            four along K, as vpdpbusd eats them, stored as q + 128
//   q4_*  u8  [block 2][4][lane 16][4]            low nibbles: k = 8 i + 0 .. 3 of group i, high nibbles: k = 8 i + 4 .. 7
// K is padded to 64 with blocks of scale 0.
//
// Activations are rounded to 8 bits on the way, in blocks of 32 along K: s = max |x| / 127, q = x / s to nearest even
// (computed as x * (127 / max |x|)). A block with a NaN or an infinity gets s = NaN; one with max |x| < 2^-100 gets zeros.
// Then, over ascending blocks, in f32: y = fma(sum of q_w q_x, d * s, y), and for q4_1 y = fma(m, s * sum of q_x, y).
#pragma once
#include <cstdint>

#include "matrix.h"

namespace etserve::cpu {

constexpr int64_t kQuantBlock = 32;
constexpr int64_t kQuantRecord = 2 * kQuantBlock;

// What the kernel takes from an activation's block beside its 32 bytes.
struct BlockMeta {
  float scale;
  union {
    int32_t start;  // q8_0, q4_0: what the sum of products starts from, -128 or -8 times the sum of q
    float sum;      // q4_1: scale times the sum of q
  };
};

// Rows of quantised activations: bytes [m][byte_stride], an odd number of cache lines apart; metas [m][blocks].
struct QuantRows {
  int8_t* bytes;
  BlockMeta* metas;
  int64_t byte_stride, blocks;
};

inline int64_t quant_byte_stride(int64_t k) { return (round_up(k, kQuantRecord) / 64 | 1) * 64; }
inline int64_t quant_rows_bytes(int64_t m, int64_t k) {
  return round_up(m * (quant_byte_stride(k) + round_up(k, kQuantRecord) / kQuantBlock * 8), 64);
}
inline QuantRows quant_rows_at(void* memory, int64_t m, int64_t k) {
  const int64_t stride = quant_byte_stride(k);
  char* bytes = static_cast<char*>(memory);
  return {reinterpret_cast<int8_t*>(bytes), reinterpret_cast<BlockMeta*>(bytes + m * stride), stride,
          round_up(k, kQuantRecord) / kQuantBlock};
}

// So few rows are quantised by every member for itself, which is cheaper than a barrier.
constexpr int64_t kMaxOwnRows = 4;
inline int64_t quant_scratch_bytes(int64_t m, int64_t k, int team_size) {
  return quant_rows_bytes(m, k) * (m <= kMaxOwnRows ? team_size : 1);
}

void pack_quantised_rows(const PackedMatrix& packed, void* data, const void* blocks, int64_t rows, int64_t first,
                         int half);
void unpack_quantised_row(const PackedMatrix& packed, int64_t row, float* out);

}  // namespace etserve::cpu
