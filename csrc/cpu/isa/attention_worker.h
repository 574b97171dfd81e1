// One thread's part of attention: the rows of one job over one partition or over all of them.
#pragma once
#include "attention_plan.h"
#include "attention_tile.h"
#include "kernels.h"
#include "simd.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

// Rows [row, row + rows) of one sequence and KV head; row i is token i / group of this step and head i % group.
struct Job {
  int seq, kv_head;
  int num_tokens;
  int row, rows;
  int context;           // positions in the table's blocks
  const int32_t* table;  // blocks to read, ascending in the sequence
  const int32_t* kept;   // null: they are all of its blocks; else their places in the sequence
};

// Where the keys and values of a tile's blocks lie.
struct Tile {
  int num_blocks;
  Words keys[kTileBlocks], values[kTileBlocks];
};

template <class Dot>
class Worker {
 public:
  Worker(const AttentionArgs& args, const AttentionScratch& plan, float* scratch, float* tile_maxima)
      : a_(args), plan_(plan), group_(args.num_heads / args.num_kv_heads), stride_(static_cast<int>(plan.padded_dim)),
        head_words_(head_words<Dot>(args.head_dim)), tile_maxima_(tile_maxima) {
    scores_ = scratch;
    weights_ = reinterpret_cast<typename Dot::Operand*>(scores_ + plan.scores);
    query_ = reinterpret_cast<typename Dot::Operand*>(scores_ + plan.scores + plan.weights);
    partial_ = scores_ + plan.scores + plan.weights + plan.queries;
    merged_ = partial_ + plan.partial;
    sums_ = merged_ + plan.merged;
    values_ = reinterpret_cast<uint32_t*>(sums_ + plan.sums);
  }

  // All partitions one after the other, and the rows' output.
  void run_whole(const Job& job) {
    load_queries(job);
    float maxima[kTileRows], totals[kTileRows];
    for (int r = 0; r < job.rows; ++r) clear(merged_ + r * stride_, &maxima[r], &totals[r]);
    const int first = lowest_position(position(job, 0)) / kPartitionTokens;
    const int last = position(job, job.rows - 1) / kPartitionTokens;
    for (int p = first; p <= last; ++p) {
      run_partition(job, p, last);
      for (int r = 0; r < job.rows; ++r)
        fold(merged_ + r * stride_, &maxima[r], &totals[r], partial_ + r * stride_, maxima_[r], totals_[r]);
    }
    for (int r = 0; r < job.rows; ++r) finish_row(job, r, merged_ + r * stride_, maxima[r], totals[r]);
  }

  // One partition, left in `to` ([row of the sequence and KV head][partition] of partial_row floats).
  void run_split(const Job& job, int partition, int num_partitions, float* to) {
    load_queries(job);
    run_partition(job, partition, partition);
    for (int r = 0; r < job.rows; ++r) {
      float* slot = to + ((job.row + r) * static_cast<int64_t>(num_partitions) + partition) * plan_.partial_row;
      std::memcpy(slot, partial_ + r * stride_, sizeof(float) * static_cast<size_t>(stride_));
      slot[stride_] = maxima_[r];
      slot[stride_ + 1] = totals_[r];
    }
  }

  // What run_split left, folded together, and the row's output.
  void finish_split(const Job& job, int num_partitions, const float* from) {
    const int first = lowest_position(position(job, 0)) / kPartitionTokens;
    const int last = position(job, 0) / kPartitionTokens;
    float maximum, total;
    clear(merged_, &maximum, &total);
    for (int p = first; p <= last; ++p) {
      const float* slot = from + (job.row * static_cast<int64_t>(num_partitions) + p) * plan_.partial_row;
      fold(merged_, &maximum, &total, slot, slot[stride_], slot[stride_ + 1]);
    }
    finish_row(job, 0, merged_, maximum, total);
  }

  int lowest_position(int position) const { return a_.window > 0 && position >= a_.window ? position - a_.window + 1 : 0; }
  int position(const Job& job, int r) const { return job.context - job.num_tokens + (job.row + r) / group_; }

 private:
  int head(const Job& job, int r) const { return job.kv_head * group_ + (job.row + r) % group_; }
  int64_t token(const Job& job, int r) const { return a_.query_start[job.seq] + (job.row + r) / group_; }
  bool wants_mass(const Job& job, int r) const {
    return a_.block_mass != nullptr && (job.row + r) / group_ == job.num_tokens - 1;
  }
  float* mass_of(const Job& job, int r) const {
    return a_.block_mass + (static_cast<int64_t>(job.seq) * a_.num_heads + head(job, r)) * a_.max_blocks;
  }
  float* tile_maxima_of(const Job& job, int r) const {
    return tile_maxima_ + (static_cast<int64_t>(job.seq) * a_.num_heads + head(job, r)) * plan_.max_tiles;
  }

  void clear(float* out, float* maximum, float* total) const {
    std::memset(out, 0, sizeof(float) * static_cast<size_t>(stride_));
    *maximum = -kInf;
    *total = 0.0f;
  }

  void load_queries(const Job& job) {
    for (int r = 0; r < job.rows; ++r) {
      const float* q = a_.q + (token(job, r) * a_.num_heads + head(job, r)) * static_cast<int64_t>(a_.head_dim);
      for (int d = 0; d < a_.head_dim; d += kLanes) {
        typename Dot::Operand packed[kLanes / Dot::kStep];
        Dot::pack16(packed, load_below(q + d, a_.head_dim - d, 0.0f));
        const int steps = smaller(kLanes, a_.head_dim - d) / Dot::kStep;
        for (int i = 0; i < steps; ++i) query_[(d / Dot::kStep + i) * kTileRows + r] = packed[i];
      }
    }
  }

  // Leaves o in partial_, and maxima_ and totals_: the softmax of each row over one partition, not yet divided. Behind
  // it this thread goes on up to last_partition, whose blocks may be fetched ahead.
  void run_partition(const Job& job, int partition, int last_partition) {
    for (int r = 0; r < job.rows; ++r) {
      clear(partial_ + r * stride_, &maxima_[r], &totals_[r]);
      store(sums_ + r * kLanes, zero());
    }
    const int last = position(job, job.rows - 1);
    const int begin = larger(partition * kTilesPerPartition, lowest_position(position(job, 0)) / kTileTokens);
    const int end = smaller((partition + 1) * kTilesPerPartition, last / kTileTokens + 1);
    const int fetched = smaller((last_partition + 1) * kTilesPerPartition, last / kTileTokens + 1);
    Tile now, ahead;
    if (begin < end) find_blocks(job, begin, last, &now);
    for (int tile = begin; tile < end; ++tile) {
      find_blocks(job, tile + 1 < fetched ? tile + 1 : tile, last, &ahead);
      run_tile(job, tile, now, ahead);
      now = ahead;
    }
    for (int r = 0; r < job.rows; ++r) totals_[r] = reduce_add(load(sums_ + r * kLanes));
  }

  // The tile's blocks; the last one fills the rest of the arrays.
  void find_blocks(const Job& job, int tile, int last_position, Tile* found) const {
    const int first = tile * kTileBlocks;
    found->num_blocks = smaller(kTileBlocks, last_position / kBlockSize + 1 - first);
    const int32_t* table = job.table + first;
    for (int b = 0; b < kTileBlocks; ++b) {
      const int64_t at = int64_t{table[smaller(b, found->num_blocks - 1)]} * 2 * a_.num_kv_heads + job.kv_head;
      found->keys[b] = static_cast<Words>(a_.kv) + at * head_words_;
      found->values[b] = found->keys[b] + a_.num_kv_heads * head_words_;
    }
  }

  void run_tile(const Job& job, int tile, const Tile& now, const Tile& ahead) {
    const int steps = a_.head_dim / Dot::kStep, num_blocks = now.num_blocks;
    const int padded = static_cast<int>(plan_ceil(num_blocks, score_blocks(1)) * score_blocks(1));
    for (int r = 0; r < job.rows; r += kScoreRows)
      score_group<Dot, kScoreRows>(smaller(kScoreRows, job.rows - r), now.keys, ahead.keys, padded, query_ + r, steps,
                                   a_.scale, scores_ + r * kTileTokens);
    if constexpr (kScaled<Dot>) scale_scores(job.rows, now);
    float decay[kTileRows], shift[kTileRows];
    move_maxima(job, tile, num_blocks, shift, decay);
    for (int r = 0; r < job.rows; ++r) weigh(job, r, tile, now, shift[r], decay[r]);

    Words ready[kTileBlocks];
    prepare_values(job, tile, num_blocks, now.values, ready);
    for (int r = 0; r < job.rows; r += kValueRows)
      value_group<Dot, kValueRows>(smaller(kValueRows, job.rows - r), ready, ahead.values, num_blocks,
                                   stride_,
                                   weights_ + r * (kTileTokens / Dot::kStep), decay + r, partial_ + r * stride_);
  }

  void scale_scores(int rows, const Tile& now) {
    for (int b = 0; b < now.num_blocks; ++b) {
      const F scales = token_scales<Dot>(now.keys[b], a_.head_dim);
      for (int r = 0; r < rows; ++r) {
        float* at = scores_ + r * kTileTokens + b * kLanes;
        store(at, mul(load(at), scales));
      }
    }
  }

  // Hides what a row must not see, moves its running maximum; shift is what its scores are lowered by, decay the factor
  // for what was summed so far.
  void move_maxima(const Job& job, int tile, int num_blocks, float* shift, float* decay) {
    for (int r = 0; r < job.rows; ++r) {
      float* row = scores_ + r * kTileTokens;
      hide(job, r, tile, num_blocks, row);
      F top = load(row);
      for (int b = 1; b < num_blocks; ++b) top = max(top, load(row + b * kLanes));
      const float moved = larger(maxima_[r], reduce_max(top));
      shift[r] = moved == -kInf ? 0.0f : moved;
      decay[r] = maxima_[r] - shift[r];
      maxima_[r] = moved;
    }
    for (int r = job.rows; r % kLanes != 0; ++r) decay[r] = 0.0f;
    for (int r = 0; r < job.rows; r += kLanes) store(decay + r, exp_negative(load(decay + r)));
  }

  void hide(const Job& job, int r, int tile, int num_blocks, float* row) const {
    const int own = position(job, r), lowest = lowest_position(own), start = tile * kTileTokens;
    if (start + num_blocks * kBlockSize - 1 <= own && lowest <= start) return;
    for (int b = 0; b < num_blocks; ++b) {
      const int base = start + b * kBlockSize;
      F x = select(lanes_below(own + 1 - base), load(row + b * kLanes), set1(-kInf));
      if (lowest > base) x = select(lanes_below(lowest - base), set1(-kInf), x);
      store(row + b * kLanes, x);
    }
  }

  void weigh(const Job& job, int r, int tile, const Tile& now, float shift, float decay) {
    const float* row = scores_ + r * kTileTokens;
    typename Dot::Operand* to = weights_ + r * (kTileTokens / Dot::kStep);
    const bool wanted = wants_mass(job, r);
    const F lowered = set1(shift);
    F sum = zero();
    for (int b = 0; b < now.num_blocks; ++b) {
      const F p = exp_negative(sub(load(row + b * kLanes), lowered));
      sum = add(sum, p);
      F weight = p;
      if constexpr (kScaled<Dot>)  // what stands behind the context may be NaN
        weight = select(less(zero(), p), mul(p, token_scales<Dot>(now.values[b], a_.head_dim)), p);
      Dot::pack16(to + b * (kLanes / Dot::kStep), weight);
      if (wanted) mass_of(job, r)[tile * kTileBlocks + b] = reduce_add(p);
    }
    store(sums_ + r * kLanes, fma(load(sums_ + r * kLanes), set1(decay), sum));
    if (wanted) tile_maxima_of(job, r)[tile] = shift;
  }

  // Slots behind the context may hold anything, and 0 * NaN is not 0: such a block is copied, with zeros there. So is
  // every block whose rows are no multiple of 16 dims.
  void prepare_values(const Job& job, int tile, int num_blocks, const Words* values, Words* ready) {
    for (int b = 0; b < num_blocks; ++b) {
      const int valid = job.context - tile * kTileTokens - b * kBlockSize;
      ready[b] = values[b];
      if (valid < kBlockSize || stride_ != a_.head_dim) {
        uint32_t* copy = values_ + static_cast<int64_t>(b) * (kBlockSize / Dot::kStep) * stride_;
        copy_values(values[b], smaller(valid, kBlockSize), copy);
        ready[b] = copy;
      }
    }
  }

  void copy_values(Words from, int valid, uint32_t* to) const {
    std::memset(to, 0, sizeof(uint32_t) * static_cast<size_t>(kBlockSize / Dot::kStep * stride_));
    const size_t row_bytes = sizeof(uint32_t) * static_cast<size_t>(a_.head_dim);
    for (int i = 0; i * Dot::kStep < valid; ++i) {
      std::memcpy(to + i * stride_, from + i * a_.head_dim, row_bytes);
      if (i * Dot::kStep + Dot::kStep > valid)  // part of a group: the lower bits are the valid ones
        for (int d = 0; d < a_.head_dim; ++d) to[i * stride_ + d] &= (1u << 32 / Dot::kStep * (valid % Dot::kStep)) - 1u;
    }
  }

  // Merges a partial softmax (o2, m2, l2) into (o, m, l). An empty one leaves the other's bits alone.
  void fold(float* o, float* m, float* l, const float* o2, float m2, float l2) const {
    const float moved = larger(*m, m2), shift = moved == -kInf ? 0.0f : moved;
    const float keep = exp_negative(*m - shift), take = exp_negative(m2 - shift);
    const F keep16 = set1(keep), take16 = set1(take);
    for (int d = 0; d < stride_; d += kLanes) store(o + d, fma(load(o + d), keep16, mul(load(o2 + d), take16)));
    *l = *l * keep + l2 * take;
    *m = moved;
  }

  void finish_row(const Job& job, int r, float* o, float maximum, float total) {
    const float inverse = 1.0f / total;
    const int64_t at = (token(job, r) * a_.num_heads + head(job, r)) * static_cast<int64_t>(a_.head_dim);
    for (int d = 0; d < stride_; d += kLanes) store(o + d, mul(load(o + d), set1(inverse)));
    if (a_.out_type == DType::bf16) {
      uint16_t* out = static_cast<uint16_t*>(a_.out) + at;
      for (int d = 0; d < a_.head_dim; ++d) out[d] = to_bf16(o[d]);
    } else {
      std::memcpy(static_cast<float*>(a_.out) + at, o, sizeof(float) * static_cast<size_t>(a_.head_dim));
    }
    if (wants_mass(job, r)) finish_mass(job, r, maximum, inverse);
  }

  void finish_mass(const Job& job, int r, float maximum, float inverse) const {
    float* mass = mass_of(job, r);
    const float* shifts = tile_maxima_of(job, r);
    const int own = position(job, r);
    const int first = lowest_position(own) / kTileTokens * kTileBlocks, end = own / kBlockSize + 1;
    for (int b = 0; b < a_.max_blocks; ++b) {
      const bool seen = b >= first && b < end;
      mass[b] = seen ? mass[b] * exp_negative(shifts[b / kTileBlocks] - maximum) * inverse : 0.0f;
    }
    for (int i = job.kept ? end - 1 : -1; i >= 0; --i) {  // from the last: places never lie below their index
      const float moved = mass[i];
      mass[i] = 0.0f;
      mass[job.kept[i]] = moved;
    }
  }

  const AttentionArgs& a_;
  const AttentionScratch& plan_;
  const int group_, stride_;
  const int64_t head_words_;
  float* tile_maxima_;
  float* scores_;                   // [kTileRows][kTileTokens]
  typename Dot::Operand* weights_;  // [kTileRows][kTileTokens / kStep]
  typename Dot::Operand* query_;    // [head_dim / kStep][kTileRows]
  float *partial_, *merged_;        // [kTileRows][stride]
  float* sums_;                     // [kTileRows][16]
  uint32_t* values_;                // [kTileBlocks][16 / kStep][stride]
  float maxima_[kTileRows], totals_[kTileRows];
};

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
