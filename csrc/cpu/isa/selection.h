// Which blocks each KV head of a sequence reads in this call: scan, cut, and the lists that attention then walks.
#pragma once
#include "block_cut.h"
#include "sketch_scan.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

// What one KV head of a sequence reads. Where blocks are skipped, `table` names only the kept ones and `context` counts
// only their tokens; the last block is always kept, so that what is not full stays at the end.
struct ReadList {
  const int32_t* table;
  const int32_t* kept;  // null, or the place of each table entry in the sequence
  int context;
};

inline uint64_t mixed(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class Dot>
class Selection {
 public:
  Selection(const AttentionArgs& args, Team& team, int64_t longest)
      : a_(args), s_(*args.selection), team_(team), layout_(args.head_dim, s_.bits),
        plan_(args.num_seqs, longest, args.num_heads, args.num_kv_heads), group_(args.num_heads / args.num_kv_heads),
        scanner_(args, layout_) {
    sums_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(s_.scratch) + 63) & ~uintptr_t{63});
    maxima_ = sums_ + plan_.sums;
    tables_ = reinterpret_cast<int32_t*>(maxima_ + plan_.maxima);
    kept_ = tables_ + plan_.lists;
    counts_ = kept_ + plan_.lists;
    keys_ = reinterpret_cast<float*>(counts_ + plan_.counts) + team.rank() * plan_.per_thread;
    work_ = keys_ + plan_.blocks;
    factors_ = work_ + plan_.blocks + kLanes;
  }

  // The same on every member; ends behind a barrier.
  void run() {
    if (s_.rule.selector == Selector::sketch) scan();
    const int64_t count = static_cast<int64_t>(a_.num_seqs) * a_.num_kv_heads;
    for (int64_t item = team_.next(); item < count; item = team_.next())
      choose(static_cast<int>(item / a_.num_kv_heads), static_cast<int>(item % a_.num_kv_heads));
    team_.barrier();
  }

  ReadList list(int seq, int kv_head) const {
    const int num_kept = counts_[head_index(seq, kv_head)], total = num_blocks(seq);
    if (num_kept == total) return {table(seq), nullptr, a_.context_lens[seq]};
    const int64_t at = head_index(seq, kv_head) * plan_.blocks;
    return {tables_ + at, kept_ + at, a_.context_lens[seq] - (total - num_kept) * kBlockSize};
  }

 private:
  int64_t head_index(int seq, int kv_head) const { return static_cast<int64_t>(seq) * a_.num_kv_heads + kv_head; }
  int num_blocks(int seq) const { return (a_.context_lens[seq] + kBlockSize - 1) / kBlockSize; }
  int num_chunks(int seq) const { return (num_blocks(seq) + kChunkBlocks - 1) / kChunkBlocks; }
  int num_spans(int seq) const { return (num_chunks(seq) + kSpanChunks - 1) / kSpanChunks; }
  const int32_t* table(int seq) const { return a_.block_tables + static_cast<int64_t>(seq) * a_.max_blocks; }
  int64_t first_head(int seq, int kv_head) const { return static_cast<int64_t>(seq) * a_.num_heads + kv_head * group_; }
  bool selects(int seq) const {
    return s_.epsilon[seq] > 0.0f && a_.query_start[seq + 1] - a_.query_start[seq] == 1 &&
           a_.context_lens[seq] >= s_.rule.min_context;
  }

  void scan() {
    int64_t item = team_.next(), first = 0;
    for (int b = 0; b < a_.num_seqs; ++b) {
      if (!selects(b)) continue;
      const int64_t count = static_cast<int64_t>(num_spans(b)) * a_.num_kv_heads;
      for (; item < first + count; item = team_.next()) {
        const int at = static_cast<int>(item - first), kv_head = at % a_.num_kv_heads;
        const int begin = at / a_.num_kv_heads * kSpanChunks, end = smaller(begin + kSpanChunks, num_chunks(b));
        const int64_t head = first_head(b, kv_head);
        scanner_.scan(b, kv_head, begin, end, sums_ + head * plan_.blocks, plan_.blocks, maxima_ + head * plan_.chunks, plan_.chunks);
      }
      first += count;
    }
    team_.barrier();
  }

  void choose(int b, int kv_head) {
    const int total = num_blocks(b);
    const int64_t head = head_index(b, kv_head);
    const bool by_sketch = s_.rule.selector == Selector::sketch;
    float missing = 0.0f;
    int num_kept = total;
    const bool is_known = selects(b) && (by_sketch ? estimate(b, kv_head) : placebo_keys(b, kv_head));
    if (is_known) {
      const Cut cut = find_cut(b, by_sketch);
      num_kept = write_list(b, kv_head, cut);
      missing = by_sketch ? static_cast<float>(cut.sum) / kMassUnits : kNaN;
    }
    counts_[head] = num_kept;
    s_.num_kept[head] = num_kept;
    s_.missing[head] = missing;
    if (s_.estimated_mass) write_masses(head, total, is_known && by_sketch);
  }

  // keys_: per block the largest softmax share over the group's heads, in whole units. False if one is unknown.
  bool estimate(int b, int kv_head) {
    const int chunks = num_chunks(b);
    for (int r = 0; r < group_; ++r) {
      const float* sums = sums_ + (first_head(b, kv_head) + r) * plan_.blocks;
      const float* maxima = maxima_ + (first_head(b, kv_head) + r) * plan_.chunks;
      float top = -kInf;
      for (int c = 0; c < chunks; ++c) top = larger(top, maxima[c]);
      F total = zero();
      for (int c = 0; c < chunks; ++c) factors_[c] = maxima[c] - top;
      for (int c = 0; c < chunks; c += kLanes) store(factors_ + c, exp2_estimate(load_below(factors_ + c, chunks - c, -kInf)));
      for (int c = 0; c < chunks; ++c) total = fma(set1(factors_[c]), load(sums + c * kChunkBlocks), total);
      const float mass = reduce_add(total);
      if (!(mass > 0.0f && mass < kInf)) return false;
      for (int c = 0; c < chunks; ++c) {
        float* key = keys_ + c * kChunkBlocks;
        const F share = mul(load(sums + c * kChunkBlocks), set1(factors_[c] * (kMassUnits / mass)));
        const F rounded = round_nearest(share);
        store(key, r == 0 ? rounded : max(load(key), rounded));
      }
    }
    return true;
  }

  // Smaller is skipped first: older ones, or at random.
  bool placebo_keys(int b, int kv_head) {
    for (int i = 0; i < num_blocks(b); ++i) {
      const uint64_t place = static_cast<uint64_t>(a_.context_lens[b]) << 32 | static_cast<uint64_t>(kv_head) << 24;
      const uint64_t drawn = mixed(mixed(s_.rule.seed ^ place) + static_cast<uint64_t>(i)) >> 40;
      keys_[i] = static_cast<float>(s_.rule.selector == Selector::random ? drawn : static_cast<uint64_t>(i));
    }
    return true;
  }

  // Of blocks [first, first + 16) those that may be skipped.
  Mask may_skip(int b, int first) const {
    const int begin = s_.rule.sink_blocks - first, end = num_blocks(b) - s_.rule.recent_blocks - first;
    uint32_t lanes = bits(lanes_below(end)) & ~bits(lanes_below(begin));
    if (s_.is_protected && lanes) {
      const uint8_t* is_protected = s_.is_protected + static_cast<int64_t>(b) * a_.max_blocks + first;
      for (int i = larger(begin, 0); i < smaller(end, kLanes); ++i)
        if (is_protected[i]) lanes &= ~(1u << i);
    }
    return from_bits(lanes);
  }

  Cut find_cut(int b, bool by_sketch) {
    const int total = num_blocks(b);
    int count = 0;
    for (int i = 0; i < total; i += kLanes) count += compress_store(work_ + count, may_skip(b, i), load(keys_ + i));
    const double least = s_.rule.min_kept_share * total, share = by_sketch ? 0.0 : s_.rule.share * total;
    const int minimum = larger(larger(1, s_.rule.min_kept_blocks), static_cast<int>(__builtin_ceil(larger(least, share))));
    const double budget = by_sketch ? __builtin_floor(static_cast<double>(s_.epsilon[b]) * kMassUnits) : double{kInf};
    return finder_.find(work_, count, budget, total > minimum ? total - minimum : 0);
  }

  int write_list(int b, int kv_head, Cut cut) {
    const int64_t at = head_index(b, kv_head) * plan_.blocks;
    const F bar = set1(cut.key);
    int num_kept = 0;
    for (int first = 0; first < num_blocks(b); first += kLanes) {
      const F keys = load(keys_ + first);
      const uint32_t candidates = bits(may_skip(b, first));
      uint32_t skipped = candidates & bits(less(keys, bar));
      for (uint32_t ties = candidates & bits(at_least(bar, keys)) & ~skipped; ties && cut.num_equal > 0; ties &= ties - 1) {
        skipped |= ties & -ties;
        --cut.num_equal;
      }
      const Mask kept = from_bits(bits(lanes_below(num_blocks(b) - first)) & ~skipped);
      num_kept += compress_ids(kept_ + at + num_kept, kept, first);
    }
    for (int i = 0; i < num_kept; ++i) tables_[at + i] = table(b)[kept_[at + i]];
    return num_kept;
  }

  void write_masses(int64_t head, int total, bool is_known) const {
    float* to = s_.estimated_mass + head * a_.max_blocks;
    for (int i = 0; i < a_.max_blocks; ++i) to[i] = is_known && i < total ? keys_[i] / kMassUnits : is_known ? 0.0f : kNaN;
  }

  const AttentionArgs& a_;
  const SelectionArgs& s_;
  Team& team_;
  const SketchLayout layout_;
  const SelectionScratch plan_;
  const int group_;
  float *sums_, *maxima_;
  int32_t *tables_, *kept_, *counts_;
  float* keys_;  // of one sequence and KV head
  float* work_;
  float* factors_;
  Scanner<Dot> scanner_;
  CutFinder finder_;
};

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
