// How the KV cache of one layer is laid out: [num_blocks][2][num_kv_heads][kv_head_bytes], index 0 keys, 1 values.
//   f32        keys [head_dim][16]        values [16][head_dim]
//   bf16, f16  keys [head_dim/2][16][2]   values [8][head_dim][2]   (pairs along the reduced axis, as vdpbf16ps eats them)
//   i8         keys [head_dim/4][16][4]   values [4][head_dim][4]   (head_dim a multiple of 4), and behind either f32 [16]:
//              the scale of each token, so that an entry is code * scale
#pragma once
#include "kernels.h"

namespace etserve::cpu {
namespace {

constexpr DType kI8 = static_cast<DType>(32);  // of KV entries alone, so not among the types of matrices

// Bytes of the keys, or of the values, of one block and KV head.
inline int64_t kv_head_bytes(int head_dim, DType type) {
  const int64_t entry = type == DType::f32 ? 4 * head_dim : type == kI8 ? head_dim + 4 : 2 * head_dim;
  return kBlockSize * entry;
}

}  // namespace
}  // namespace etserve::cpu
