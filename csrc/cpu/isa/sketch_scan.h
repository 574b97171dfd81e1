// Estimated scores of one sequence's query row against a span of blocks, of the query heads of one KV head.
#pragma once
#include "attention_tile.h"
#include "kernels.h"
#include "rotate.h"
#include "sketch_dot.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

constexpr int kScanRows = 4;  // query heads that share each expanded code
constexpr int kMaxScanDim = 256;
constexpr float kLog2E = 1.44269504088896341f;  // estimates are powers of 2: their scale takes it in
constexpr int kAhead = kChunkBlocks;  // blocks between a fetch and its use: the means of a whole chunk are read first

// 2^x for x <= 0 within 1.1e-4, next to 0 below -120; NaN gives NaN. (Minimax of degree 3 on |f| <= 1/2.)
inline F exp2_estimate(F x) {
  x = max(set1(-120.0f), x);  // this order lets NaN through
  const F n = round_nearest(x), f = sub(x, n);
  F p = fma(set1(0.0551716648f), f, set1(0.2426111251f));
  p = fma(p, f, set1(0.6932609923f));
  p = fma(p, f, set1(0.9999280735f));
  return scale_by_power(p, n, x);
}

// What the scan knows of one query head, `scale` taken in.
template <class Dot>
struct ScanQuery {
  alignas(64) float plain[kMaxScanDim];  // padded with zeros
  alignas(64) typename Dot::Operand exact[kMaxScanDim / Dot::kStep + kLanes];  // for keys without a sketch
  int32_t codes[kMaxScanDim / 4];        // rotated, rounded to bytes
  float unit;                            // a code's level is a whole number of it
  int32_t start;                         // takes the offset of levels away

  void load_query(const float* q, float scale, const SketchLayout& layout, const float* signs) {
    const int dim = layout.head_dim;
    for (int d = 0; d < layout.padded_dim; d += kLanes) {
      const F x = load_below(q + d, dim - d, 0.0f);
      Dot::pack16(exact + d / Dot::kStep, x);
      store(plain + d, mul(x, set1(scale)));
    }
    alignas(64) float x[kMaxScanDim];
    for (int d = 0; d < dim; ++d) x[d] = plain[d] * signs[d];
    hadamard(dim, [&x](int i, int j) {
      const float a = x[i], b = x[j];
      x[i] = a + b;
      x[j] = a - b;
    });
    float top = 0.0f;
    for (int d = 0; d < dim; ++d) top = larger(top, __builtin_fabsf(x[d]));
    quantise(x, top, layout);
    unit = top / 127.0f * hadamard_norm(dim) * (layout.bits == 2 ? kLevelUnit2 : kLevelUnit1);
  }

 private:
  void quantise(const float* x, float top, const SketchLayout& layout) {
    const float factor = top > 0.0f && top < kInf ? 127.0f / top : 0.0f;
    int32_t sum = 0;
    int8_t bytes[kMaxScanDim] = {};
    for (int d = 0; d < layout.head_dim; ++d) {
      // Adding 1.5 * 2^23 rounds to a whole number, ties to even, in every instruction set.
      const int32_t rounded = static_cast<int32_t>((x[d] * factor + 12582912.0f) - 12582912.0f);
      bytes[d] = static_cast<int8_t>(rounded);
      sum += rounded;
    }
    std::memcpy(codes, bytes, sizeof codes);
    start = -kLevelOffset * sum;
  }
};

// One thread's scan. Blocks are taken in chunks of 16 by their place in the sequence, whatever the span or the threads.
template <class Dot>
class Scanner {
 public:
  Scanner(const AttentionArgs& args, const SketchLayout& layout)
      : a_(args), s_(*args.selection), layout_(layout), group_(args.num_heads / args.num_kv_heads) {}

  // Chunks [begin, end) of one sequence. sums: [group][stride] by block; maxima: [group][max_chunks].
  void scan(int seq, int kv_head, int begin, int end, float* sums, int64_t stride, float* maxima, int64_t max_chunks) {
    for (int first = 0; first < group_; first += kScanRows) {
      const int rows = smaller(kScanRows, group_ - first);
      const float* q = a_.q + (static_cast<int64_t>(a_.query_start[seq]) * a_.num_heads + kv_head * group_ + first) * a_.head_dim;
      for (int r = 0; r < rows; ++r) queries_[r].load_query(q + r * a_.head_dim, a_.scale * kLog2E, layout_, s_.signs);
      for (int chunk = begin; chunk < end; ++chunk)
        scan_rows<kScanRows>(rows, seq, kv_head, chunk, sums + first * stride, stride, maxima + first * max_chunks, max_chunks);
    }
  }

 private:
  template <int R>
  void scan_rows(int rows, int seq, int kv_head, int chunk, float* sums, int64_t stride, float* maxima, int64_t max_chunks) {
    if constexpr (R > 1) {
      if (rows < R) return scan_rows<R - 1>(rows, seq, kv_head, chunk, sums, stride, maxima, max_chunks);
    }
    F scores[R][kChunkBlocks];
    const int count = score_chunk<R>(seq, kv_head, chunk, scores);
    for (int r = 0; r < R; ++r) {
      F top = scores[r][0];
      for (int i = 1; i < count; ++i) top = max(top, scores[r][i]);
      const float shift = reduce_max(top);
      for (int i = 0; i < kChunkBlocks; ++i)
        scores[r][i] = i < count ? exp2_estimate(sub(scores[r][i], set1(shift))) : zero();
      store(sums + r * stride + chunk * kChunkBlocks, sum_each(scores[r]));
      maxima[r * max_chunks + chunk] = shift;
    }
  }

  // Returns how many blocks of the chunk the sequence has.
  template <int R>
  int score_chunk(int seq, int kv_head, int chunk, F (*scores)[kChunkBlocks]) {
    const int context = a_.context_lens[seq], first = chunk * kChunkBlocks;
    const int full = smaller(kChunkBlocks, context / kBlockSize - first);
    const int32_t* table = a_.block_tables + static_cast<int64_t>(seq) * a_.max_blocks + first;
    const int last = larger(context / kBlockSize - first, 1) - 1;
    const uint8_t* sketches[kChunkBlocks + kAhead];
    for (int i = 0; i < kChunkBlocks + kAhead; ++i) {
      const int64_t block = table[smaller(i, last)];
      sketches[i] = static_cast<const uint8_t*>(s_.sketches) + (block * a_.num_kv_heads + kv_head) * layout_.num_bytes;
    }
    float bases[R][kChunkBlocks];
    dot_means<R>(sketches, full, bases);
    layout_.bits == 2 ? dot_codes<2, R>(sketches, full, bases, scores) : dot_codes<1, R>(sketches, full, bases, scores);
    const int valid = context - (first + full) * kBlockSize;  // of the block behind the full ones
    if (full == kChunkBlocks || valid <= 0) return full;
    score_exactly<R>(table[full], kv_head, valid, full, scores);
    return full + 1;
  }

  template <int R>
  void dot_means(const uint8_t* const* sketches, int full, float (*bases)[kChunkBlocks]) const {
    F parts[R][kChunkBlocks];
    for (int i = 0; i < kChunkBlocks; ++i) {
      for (int r = 0; r < R; ++r) parts[r][i] = zero();
      if (i >= full) continue;
      const uint16_t* mean = reinterpret_cast<const uint16_t*>(sketches[i] + layout_.mean_at);
      for (int d = 0; d < layout_.padded_dim; d += kLanes) {
        const F x = load_bf16(mean + d);
        for (int r = 0; r < R; ++r) parts[r][i] = fma(x, load(queries_[r].plain + d), parts[r][i]);
      }
    }
    for (int r = 0; r < R; ++r) store(bases[r], sum_each(parts[r]));
  }

  template <int Bits, int R>
  void dot_codes(const uint8_t* const* sketches, int full, const float (*bases)[kChunkBlocks],
                 F (*scores)[kChunkBlocks]) const {
    const int32_t* queries[R];
    int32_t starts[R];
    for (int r = 0; r < R; ++r) queries[r] = queries_[r].codes, starts[r] = queries_[r].start;
    for (int i = 0; i < full; ++i) {
      for (int64_t line = 0; line < layout_.num_bytes; line += 64) prefetch(sketches[i + kAhead] + line);
      I sums[R];
      code_dots<Bits, R>(sketches[i], layout_.lines, queries, starts, sums);
      const F scales = load_bf16(reinterpret_cast<const uint16_t*>(sketches[i] + layout_.scales_at));
      for (int r = 0; r < R; ++r)
        scores[r][i] = fma(mul(to_float(sums[r]), set1(queries_[r].unit)), scales, set1(bases[r][i]));
    }
  }

  // A block that is not full yet has no sketch: its keys themselves.
  template <int R>
  void score_exactly(int32_t block, int kv_head, int valid, int at, F (*scores)[kChunkBlocks]) const {
    const int64_t words = head_words<Dot>(a_.head_dim);
    const Words keys = static_cast<Words>(a_.kv) + (static_cast<int64_t>(block) * 2 * a_.num_kv_heads + kv_head) * words;
    for (int r = 0; r < R; ++r) {
      F sum = zero();
      for (int i = 0; i < a_.head_dim / Dot::kStep; ++i)
        sum = Dot::dot(sum, Dot::load16(keys + i * kLanes), Dot::spread(queries_[r].exact + i));
      if constexpr (kScaled<Dot>) sum = mul(sum, token_scales<Dot>(keys, a_.head_dim));
      scores[r][at] = select(lanes_below(valid), mul(sum, set1(a_.scale * kLog2E)), set1(-kInf));
    }
  }

  const AttentionArgs& a_;
  const SelectionArgs& s_;
  const SketchLayout& layout_;
  const int group_;
  ScanQuery<Dot> queries_[kScanRows];
};

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
