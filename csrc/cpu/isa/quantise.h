// Rounding of activation rows to 8 bits in blocks of 32. The definition is in quant.h.
#pragma once
#include "quant.h"
#include "vec16.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

constexpr float kTinyMaximum = 0x1p-100f;  // below it 127 / maximum could overflow

// One block of f32: plain loops that the compiler turns into vectors.
ETSERVE_INLINE void quantise_block(const float* x, DType type, int8_t* bytes, BlockMeta* meta) {
  uint32_t largest = 0;  // of the bits without sign: NaN above infinity above numbers
  for (int i = 0; i < kQuantBlock; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  const bool is_finite = largest < 0x7f800000u;
  const float maximum = bits_to_float(largest);
  const bool is_zero = !is_finite || maximum < kTinyMaximum;
  const float inverse = is_zero ? 0.0f : 127.0f / maximum;
  int32_t sum = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, which lands in the low bits.
    const float shifted = (is_zero ? 0.0f : x[i]) * inverse + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    const int32_t q = bits - 0x4b400000;
    bytes[i] = static_cast<int8_t>(q);
    sum += q;
  }
  meta->scale = is_finite ? (is_zero ? 0.0f : maximum * (1.0f / 127.0f)) : bits_to_float(0x7fc00000u);
  if (type == DType::q6_k) {
    for (int h = 0; h < 2; ++h) {
      int half = 0;
      for (int i = 0; i < 16; ++i) half += bytes[16 * h + i];
      meta->halves[h] = static_cast<int16_t>(half);
    }
  } else if (type == DType::q4_1 || type >= DType::q4_k) {
    meta->sum = meta->scale * static_cast<float>(sum);
  } else {
    meta->start = sum * (type == DType::q8_0 ? -128 : -8);
  }
}

[[maybe_unused]] void quantise_row(const MatmulArgs& a, const QuantRows& rows, int64_t row) {
  int8_t* bytes = rows.bytes + row * rows.byte_stride;
  BlockMeta* metas = rows.metas + row * rows.blocks;
  for (int64_t b = 0; b < rows.blocks; ++b) {
    const int64_t first = b * kQuantBlock, at = row * a.x_stride + first;
    const int64_t left = a.w.k - first, count = left < 0 ? 0 : left < kQuantBlock ? left : kQuantBlock;
    const bool is_bf16 = a.w.input == DType::bf16;
    const float* x = static_cast<const float*>(a.x) + at;
    float copy[kQuantBlock] = {};
    if (is_bf16) {
      for (int64_t i = 0; i < count; ++i) copy[i] = from_bf16(static_cast<const uint16_t*>(a.x)[at + i]);
    } else if (count < kQuantBlock) {
      for (int64_t i = 0; i < count; ++i) copy[i] = x[i];
    }
    quantise_block(is_bf16 || count < kQuantBlock ? copy : x, a.w.type, bytes + first, metas + b);
  }
}

// The rows as the kernels take them; every member has them when this returns.
[[maybe_unused]] QuantRows quantise_rows(const MatmulArgs& a, Team& team) {
  const bool is_own = a.m <= kMaxOwnRows;
  char* memory = static_cast<char*>(a.scratch) + (is_own ? team.rank() * quant_rows_bytes(a.m, a.w.k) : 0);
  const QuantRows rows = quant_rows_at(memory, a.m, a.w.k);
  int64_t begin = 0, end = a.m;
  if (!is_own) team.split(a.m, 1, &begin, &end);
  for (int64_t row = begin; row < end; ++row) quantise_row(a, rows, row);
  if (!is_own) team.barrier();
  return rows;
}

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
