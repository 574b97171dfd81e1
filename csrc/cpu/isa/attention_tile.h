// The inner loops of attention: scores of query rows against key blocks, and weighted sums of value rows.
//
// Each output element has one accumulator and one order of summation, whatever the number of rows and blocks that share
// the registers: that makes a row's result independent of its company.
#pragma once
#include <type_traits>

#include "attention_plan.h"
#include "kv_unpack.h"
#include "simd.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

// f32 cache: no pairs. (Bf16Dot, and what F16Dot and I8Dot unpack with, stand with each instruction set.)
struct F32Dot {
  using Operand = float;
  static constexpr int kStep = 1;
  using Loaded = F;
  using Spread = F;
  static Loaded load16(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static Spread spread(const Operand* b) { return set1(*b); }
  static F dot(F acc, Loaded a, Spread b) { return fma(a, b, acc); }
  static void pack16(Operand* to, F a) { store(to, a); }
};

// Caches that are unpacked to kStep floats along the reduced axis.
template <int Step, void (*Unpack)(const uint32_t*, F*)>
struct UnpackedDot {
  static constexpr int kStep = Step;
  struct Operand {
    float v[Step];
  };
  struct Loaded {
    F v[Step];
  };
  struct Spread {
    const float* v;
  };
  static Loaded load16(const uint32_t* p) {
    Loaded to;
    Unpack(p, to.v);
    return to;
  }
  static Spread spread(const Operand* b) { return {b->v}; }
  static F dot(F acc, const Loaded& a, Spread b) {
    for (int i = 0; i < Step; ++i) acc = fma(a.v[i], set1(b.v[i]), acc);
    return acc;
  }
  static void pack16(Operand* to, F a) { store(to->v, a); }
};
using F16Dot = UnpackedDot<2, unpack_f16>;
using I8Dot = UnpackedDot<4, unpack_i8>;

// Whether each token has a scale, behind the block.
template <class Dot>
constexpr bool kScaled = std::is_same_v<Dot, I8Dot>;

// 4-byte words of the keys, or of the values, of one block and KV head.
template <class Dot>
constexpr int64_t head_words(int head_dim) {
  return kBlockSize * (head_dim / Dot::kStep + (kScaled<Dot> ? 1 : 0));
}

// Of a block whose head_words are such: the scales of its tokens.
template <class Dot>
inline F token_scales(const uint32_t* block, int head_dim) {
  return load(reinterpret_cast<const float*>(block + kBlockSize * (head_dim / Dot::kStep)));
}

// A cache block of one KV head is 16 * head_dim / kStep words of 4 bytes, 16 of them per step of the keys and head_dim
// per step of the values.
using Words = const uint32_t*;

// scores[r][16 c ..] = scale * sum over steps of query[step][r] * keys[c][step], for R rows and C blocks.
// While it runs, the lines of `ahead` (blocks of the same size) are fetched.
template <class Dot, int R, int C>
inline __attribute__((always_inline)) void score_rows(const Words* keys, const Words* ahead,
                                                      const typename Dot::Operand* query, int steps, float scale,
                                                      float* scores) {
  F acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = zero();
  for (int i = 0; i < steps; ++i) {
    typename Dot::Loaded x[C];
    for (int c = 0; c < C; ++c) {
      x[c] = Dot::load16(keys[c] + i * 16);
      if constexpr (R <= 8) prefetch(ahead[c] + i * 16);
    }
    for (int r = 0; r < R; ++r) {
      const typename Dot::Spread q = Dot::spread(query + i * kTileRows + r);
      for (int c = 0; c < C; ++c) acc[r][c] = Dot::dot(acc[r][c], x[c], q);
    }
  }
  const F factor = set1(scale);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(scores + r * kTileTokens + c * 16, mul(acc[r][c], factor));
}

// `num_blocks` is a multiple of C (the caller repeats its last block).
template <class Dot, int R>
void score_blocks_of(const Words* keys, const Words* ahead, int num_blocks, const typename Dot::Operand* query, int steps,
                     float scale, float* scores) {
  constexpr int C = score_blocks(R);
  for (int b = 0; b < num_blocks; b += C)
    score_rows<Dot, R, C>(keys + b, ahead + b, query, steps, scale, scores + b * 16);
}

template <class Dot, int R>
void score_group(int rows, const Words* keys, const Words* ahead, int num_blocks, const typename Dot::Operand* query,
                 int steps, float scale, float* scores) {
  if constexpr (R > 1) {
    if (rows < R) return score_group<Dot, R - 1>(rows, keys, ahead, num_blocks, query, steps, scale, scores);
  }
  score_blocks_of<Dot, R>(keys, ahead, num_blocks, query, steps, scale, scores);
}

// out[r][16 c ..] = out[r][16 c ..] * decay[r] + sum over blocks and steps of weights[r][step] * values[block][step].
template <class Dot, int R, int C>
void value_rows(const Words* values, const Words* ahead, int num_blocks, int stride, const typename Dot::Operand* weights,
                const float* decay, float* out) {
  constexpr int kSteps = kBlockSize / Dot::kStep;
  F acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = mul(load(out + r * stride + c * 16), set1(decay[r]));
  for (int b = 0; b < num_blocks; ++b) {
    const Words block = values[b];
    const typename Dot::Operand* w = weights + b * kSteps;
    for (int i = 0; i < kSteps; ++i) {
      typename Dot::Loaded x[C];
      for (int c = 0; c < C; ++c) {
        x[c] = Dot::load16(block + i * stride + c * 16);
        if constexpr (R <= 8) prefetch(ahead[b] + i * stride + c * 16);
      }
      for (int r = 0; r < R; ++r) {
        const typename Dot::Spread p = Dot::spread(w + r * (kTileTokens / Dot::kStep) + i);
        for (int c = 0; c < C; ++c) acc[r][c] = Dot::dot(acc[r][c], x[c], p);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(out + r * stride + c * 16, acc[r][c]);
}

template <class Dot, int R, int C>
void value_columns(const Words* values, const Words* ahead, int num_blocks, int stride,
                   const typename Dot::Operand* weights, const float* decay, float* out, int begin) {
  Words from[kTileBlocks], next[kTileBlocks];
  int column = begin;
  for (; column + C * 16 <= stride; column += C * 16) {
    for (int b = 0; b < num_blocks; ++b) {
      from[b] = values[b] + column;
      next[b] = ahead[b] + column;
    }
    value_rows<Dot, R, C>(from, next, num_blocks, stride, weights, decay, out + column);
  }
  if constexpr (C > 1) {
    if (column < stride)
      value_columns<Dot, R, C / 2>(values, ahead, num_blocks, stride, weights, decay, out, column);
  }
}

template <class Dot, int R>
void value_group(int rows, const Words* values, const Words* ahead, int num_blocks, int stride,
                 const typename Dot::Operand* weights, const float* decay, float* out) {
  if constexpr (R > 1) {
    if (rows < R) return value_group<Dot, R - 1>(rows, values, ahead, num_blocks, stride, weights, decay, out);
  }
  value_columns<Dot, R, kValueVectors>(values, ahead, num_blocks, stride, weights, decay, out, 0);
}

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
