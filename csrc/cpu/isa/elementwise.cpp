// Norms, rotary embedding with the KV write, activations. Rows (or heads of tokens) are shared out over the team.
#include <cmath>

#include "kv_layout.h"
#include "matrix.h"
#include "vec16.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

// 1 / sqrt(mean(x^2) + eps), summed in one fixed order.
float inverse_rms(const float* x, int64_t size, float eps) {
  Vec acc = vec_set(0.0f);
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    const Vec v = vec_load(x + i);
    acc = vec_fma(v, v, acc);
  }
  float sum = vec_sum(acc);
  for (; i < size; ++i) sum += x[i] * x[i];
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + eps);
}

void norm_head(float* x, int size, const float* weight, float eps) {
  const float scale = inverse_rms(x, size, eps);
  for (int i = 0; i < size; ++i) x[i] = x[i] * scale * weight[i];
}

void rotate(float* x, int rotary_dim, const float* cos, const float* sin) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

constexpr int kMaxHeadDim = 256;

// A token's entry in bytes: returns the scale. What is not finite makes the scale NaN.
float round_to_bytes(const float* x, int size, int8_t* codes) {
  float largest = 0.0f, check = 0.0f;
  for (int d = 0; d < size; ++d) {
    const float magnitude = __builtin_fabsf(x[d]);
    largest = magnitude > largest ? magnitude : largest;
    check += x[d] * 0.0f;  // NaN if anything is not finite
  }
  const float scale = largest * (1.0f / 127.0f), factor = scale > 0.0f && check == 0.0f ? 1.0f / scale : 0.0f;
  for (int d = 0; d < size; ++d)  // adding 1.5 * 2^23 rounds to a whole number, ties to even
    codes[d] = factor > 0.0f ? static_cast<int8_t>((x[d] * factor + 12582912.0f) - 12582912.0f) : int8_t{0};
  return check == 0.0f ? scale : __builtin_nanf("");
}

// One token's vector into its place of a block of one KV head. Element by element: members write neighbouring tokens.
void write_key(const RopeArgs& a, char* head, int offset, const float* x) {
  if (a.kv_type == kI8) {
    int8_t codes[kMaxHeadDim];
    reinterpret_cast<float*>(head + kBlockSize * a.head_dim)[offset] = round_to_bytes(x, a.head_dim, codes);
    for (int d = 0; d < a.head_dim; ++d) head[d / 4 * (4 * kBlockSize) + 4 * offset + d % 4] = static_cast<char>(codes[d]);
  } else if (a.kv_type == DType::f32) {
    float* out = reinterpret_cast<float*>(head) + offset;
    for (int d = 0; d < a.head_dim; ++d) out[d * kBlockSize] = x[d];
  } else {
    uint16_t* out = reinterpret_cast<uint16_t*>(head) + 2 * offset;
    const bool is_bf16 = a.kv_type == DType::bf16;
    for (int d = 0; d < a.head_dim; ++d)
      out[d / 2 * (2 * kBlockSize) + d % 2] = is_bf16 ? to_bf16(x[d]) : to_finite_f16(x[d]);
  }
}

void write_value(const RopeArgs& a, char* head, int offset, const float* x) {
  if (a.kv_type == kI8) {
    int8_t codes[kMaxHeadDim];
    reinterpret_cast<float*>(head + kBlockSize * a.head_dim)[offset] = round_to_bytes(x, a.head_dim, codes);
    char* out = head + offset / 4 * (4 * a.head_dim) + offset % 4;
    for (int d = 0; d < a.head_dim; ++d) out[4 * d] = static_cast<char>(codes[d]);
  } else if (a.kv_type == DType::f32) {
    std::memcpy(reinterpret_cast<float*>(head) + offset * a.head_dim, x, static_cast<size_t>(a.head_dim) * 4);
  } else {
    uint16_t* out = reinterpret_cast<uint16_t*>(head) + offset / 2 * (2 * a.head_dim) + offset % 2;
    const bool is_bf16 = a.kv_type == DType::bf16;
    for (int d = 0; d < a.head_dim; ++d) out[2 * d] = is_bf16 ? to_bf16(x[d]) : to_finite_f16(x[d]);
  }
}

void rope_head(const RopeArgs& a, int64_t token, int head) {
  const int total = a.num_heads + 2 * a.num_kv_heads;
  const float* from = a.qkv + (token * total + head) * a.head_dim;
  const int half = a.rotary_dim / 2;
  const float* cos = a.cos + static_cast<int64_t>(a.positions[token]) * half;
  const float* sin = a.sin + static_cast<int64_t>(a.positions[token]) * half;
  const size_t bytes = static_cast<size_t>(a.head_dim) * 4;
  if (head < a.num_heads) {
    float* q = a.q + (token * a.num_heads + head) * a.head_dim;
    std::memcpy(q, from, bytes);
    if (a.q_norm) norm_head(q, a.head_dim, a.q_norm, a.eps);
    rotate(q, a.rotary_dim, cos, sin);
    return;
  }
  const bool is_value = head >= a.num_heads + a.num_kv_heads;
  const int kv_head = (head - a.num_heads) % a.num_kv_heads;
  const int64_t block = a.slots[token] / kBlockSize;
  const int offset = static_cast<int>(a.slots[token] % kBlockSize);
  const int64_t at = (block * 2 + is_value) * a.num_kv_heads + kv_head;
  char* entries = static_cast<char*>(a.kv) + at * kv_head_bytes(a.head_dim, a.kv_type);
  if (is_value) return write_value(a, entries, offset, from);
  alignas(64) float key[kMaxHeadDim];
  std::memcpy(key, from, bytes);
  if (a.k_norm) norm_head(key, a.head_dim, a.k_norm, a.eps);
  rotate(key, a.rotary_dim, cos, sin);
  write_key(a, entries, offset, key);
}

ETSERVE_INLINE void store_row(void* out, DType type, int64_t at, Vec v, int64_t count) {
  if (type == DType::bf16) {
    uint16_t* p = static_cast<uint16_t*>(out) + at;
    count == 16 ? store_bf16(p, v) : store_bf16_part(p, v, count);
  } else {
    float* p = static_cast<float*>(out) + at;
    count == 16 ? vec_store(p, v) : vec_store_part(p, v, count);
  }
}

ETSERVE_INLINE Vec load_row(const float* p, int64_t count) {
  return count == 16 ? vec_load(p) : vec_load_part(p, count);
}

}  // namespace

void rms_norm(const NormArgs& a, Team& team) {
  int64_t begin, end;
  team.split(a.rows, 1, &begin, &end);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = a.x + row * a.x_stride;
    const Vec scale = vec_set(inverse_rms(x, a.size, a.eps));
    for (int64_t i = 0; i < a.size; i += 16) {
      const int64_t count = a.size - i < 16 ? a.size - i : 16;
      const Vec y = vec_mul(vec_mul(load_row(x + i, count), scale), load_row(a.weight + i, count));
      store_row(a.out, a.out_type, row * a.out_stride + i, y, count);
    }
  }
}

void rope_and_write(const RopeArgs& a, Team& team) {
  const int heads = a.num_heads + 2 * a.num_kv_heads;
  int64_t begin, end;
  team.split(a.tokens * heads, 1, &begin, &end);
  for (int64_t item = begin; item < end; ++item) rope_head(a, item / heads, static_cast<int>(item % heads));
}

void silu_mul(const SiluMulArgs& a, Team& team) {
  int64_t begin, end;
  team.split(a.rows, 1, &begin, &end);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = 0; i < a.size; i += 16) {
      const int64_t count = a.size - i < 16 ? a.size - i : 16, at = row * a.size + i;
      const Vec y = vec_mul(vec_silu(load_row(a.gate + at, count)), load_row(a.up + at, count));
      store_row(a.out, a.out_type, row * a.out_stride + i, y, count);
    }
  }
}

void round_rows(const RoundArgs& a, Team& team) {
  int64_t begin, end;
  team.split(a.rows, 1, &begin, &end);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = 0; i < a.size; i += 16) {
      const int64_t count = a.size - i < 16 ? a.size - i : 16;
      store_row(a.out, DType::bf16, row * a.out_stride + i, load_row(a.x + row * a.size + i, count), count);
    }
  }
}

}  // namespace etserve::cpu::ETSERVE_ISA
