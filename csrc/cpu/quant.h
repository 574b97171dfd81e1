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
// A super-block is 256 weights along K with one or two f16, and a small scale (and minimum) for 32 or for 16 of them:
//   q4_k  w = d * s * q - e * m    q in 0 .. 15    s and m in 0 .. 63, for 32; d and e in f16
//   q5_k  the same                 q in 0 .. 31
//   q6_k  w = d * s * (q - 32)     q in 0 .. 63    s in -128 .. 127, for 16
// Of a panel it is one record:
//   d, -e       f16 [lane 16] each                -e is 0 in q6_k
//   s, m        u8 [8][lane 16] each              q6_k: s as i8 [16][lane 16]
//   q           [8 blocks of 32], each u8 [4][lane 16][4], the low four bits as in q4_*; then the others,
//               q5_k  u8 [lane 16][4]             bit g: of group g
//               q6_k  u8 [2][lane 16][4]          bits 2 g, 2 g + 1 of the first: of group g, of the second: of group 4 + g
//
// Activations are rounded to 8 bits on the way, in blocks of 32 along K: s = max |x| / 127, q = x / s to nearest even
// (computed as x * (127 / max |x|)). A block with a NaN or an infinity gets s = NaN; one with max |x| < 2^-100 gets zeros.
// Then, over ascending blocks, in f32: y = fma(sum of q_w q_x, d * s, y), and for q4_1 y = fma(m, s * sum of q_x, y). In
// super-blocks (d * s_w) stands for d and (-e) * m for m; the halves of 16 of q6_k come one after the other.
#pragma once
#include <cstdint>

#include "matrix.h"

namespace etserve::cpu {

constexpr int64_t kQuantBlock = 32;
constexpr int64_t kQuantRecord = 2 * kQuantBlock;
constexpr int64_t kSuperBlock = 256;
// Of a record of super-blocks: where scales and quants begin.
constexpr int64_t kSuperScales = 64, kSuperQuants = 320;
inline int64_t super_block_bytes(DType type) { return type == DType::q4_k ? 256 : type == DType::q5_k ? 320 : 384; }

// What the kernel takes from an activation's block beside its 32 bytes.
struct BlockMeta {
  float scale;
  union {
    int32_t start;  // q8_0, q4_0: what the sum of products starts from, -128 or -8 times the sum of q
    float sum;      // q4_1, q4_k, q5_k: scale times the sum of q
    int16_t halves[2];  // q6_k: the sum of q over the first and the second 16
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

// Rounds f32 [rows][k] to ggml's blocks of q8_0, q4_0 or q4_1, to the same bits as the gguf package does.
void round_to_blocks(DType type, const float* x, int64_t rows, int64_t k, void* blocks);
void pack_quantised_rows(const PackedMatrix& packed, void* data, const void* blocks, int64_t rows, int64_t first,
                         int half);
void pack_super_rows(const PackedMatrix& packed, void* data, const void* blocks, int64_t rows, int64_t first, int half);
void unpack_super_row(const PackedMatrix& packed, int64_t row, float* out);
void unpack_quantised_row(const PackedMatrix& packed, int64_t row, float* out);

}  // namespace etserve::cpu
