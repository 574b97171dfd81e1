// Causal varlen attention over paged KV.
//
// A row is one (query token, query head). Its positions are reduced in partitions of 512, a partition in tiles of 128
// with a running maximum, the partitions folded together in ascending order: always so, whatever else is in the batch.
// Positions that a row must not see have weight 0, and adding 0 changes nothing; so a row's bits do not depend on the
// rows that share its tile.
// Where a selection skips blocks, a row's kept blocks stand in for its sequence: the same reduction over a shorter list.
#include "attention_worker.h"
#include "kv_layout.h"
#include "selection.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

// The same sequence of calls on every member; work is handed out by the team's counter.
template <class Dot>
class Schedule {
 public:
  Schedule(const AttentionArgs& args, Team& team, const AttentionScratch& plan, float* scratch,
           const Selection<Dot>* selection)
      : a_(args), team_(team), selection_(selection), group_(args.num_heads / args.num_kv_heads), plan_(plan),
        partials_(scratch + team.size() * plan.per_thread + plan.tile_maxima),
        worker_(args, plan, scratch + team.rank() * plan.per_thread, scratch + team.size() * plan.per_thread) {}

  void run() {
    int64_t item = team_.next(), first = 0;
    bool any_split = false;
    for (int b = 0; b < a_.num_seqs; ++b)  // the long items first
      if (!is_split(b)) run_whole(b, &item, &first);
    float* to = partials_;
    for (int b = 0; b < a_.num_seqs; ++b)
      if (is_split(b)) {
        any_split = true;
        run_split(b, &item, &first, to);
        to += partial_floats(b);
      }
    team_.barrier();
    if (!any_split) return;
    finish_split();
    team_.barrier();
  }

 private:
  int tokens(int b) const { return a_.query_start[b + 1] - a_.query_start[b]; }
  int context(int b) const { return a_.context_lens[b]; }
  // Bits do not depend on it. Kept lists are short: whole, where that keeps everyone busy.
  bool is_split(int b) const {
    const bool is_short = selection_ && a_.num_seqs * a_.num_kv_heads >= 4 * team_.size();
    return tokens(b) <= kMaxSplitTokens && context(b) > kPartitionTokens && !is_short;
  }
  int partitions(int b) const { return static_cast<int>(plan_ceil(context(b), kPartitionTokens)); }
  int64_t partial_floats(int b) const {
    return static_cast<int64_t>(tokens(b)) * a_.num_heads * partitions(b) * plan_.partial_row;
  }
  float* head_partials(int b, int kv_head, float* of_sequence) const {
    return of_sequence + kv_head * (partial_floats(b) / a_.num_kv_heads);
  }
  ReadList list(int b, int kv_head) const {
    if (selection_) return selection_->list(b, kv_head);
    return {a_.block_tables + static_cast<int64_t>(b) * a_.max_blocks, nullptr, context(b)};
  }
  Job job(int b, int kv_head, int row, int rows) const {
    const ReadList read = list(b, kv_head);
    return {b, kv_head, tokens(b), row, rows, read.context, read.table, read.kept};
  }
  Job tile_job(int b, int kv_head, int tile) const {
    const int row = tile * kTileRows;
    return job(b, kv_head, row, smaller(kTileRows, tokens(b) * group_ - row));
  }

  void run_whole(int b, int64_t* item, int64_t* first) {
    const int tiles = static_cast<int>(plan_ceil(static_cast<int64_t>(tokens(b)) * group_, kTileRows));
    const int64_t count = static_cast<int64_t>(tiles) * a_.num_kv_heads;
    for (; *item < *first + count; *item = team_.next()) {
      const int at = static_cast<int>(*item - *first);
      worker_.run_whole(tile_job(b, at % a_.num_kv_heads, tiles - 1 - at / a_.num_kv_heads));
    }
    *first += count;
  }

  void run_split(int b, int64_t* item, int64_t* first, float* to) {
    const int tiles = static_cast<int>(plan_ceil(static_cast<int64_t>(tokens(b)) * group_, kTileRows));
    const int64_t count = static_cast<int64_t>(tiles) * a_.num_kv_heads * partitions(b);
    for (; *item < *first + count; *item = team_.next()) {
      const int at = static_cast<int>(*item - *first);
      const int kv_head = at % a_.num_kv_heads, rest = at / a_.num_kv_heads;
      const Job part = tile_job(b, kv_head, rest % tiles);
      if (rest / tiles * kPartitionTokens < part.context)
        worker_.run_split(part, rest / tiles, partitions(b), head_partials(b, kv_head, to));
    }
    *first += count;
  }

  void finish_split() {
    int64_t item = team_.next(), first = 0;
    float* from = partials_;
    for (int b = 0; b < a_.num_seqs; ++b) {
      if (!is_split(b)) continue;
      for (; item < first + a_.num_kv_heads; item = team_.next()) {
        const int kv_head = static_cast<int>(item - first);
        for (int row = 0; row < tokens(b) * group_; ++row)
          worker_.finish_split(job(b, kv_head, row, 1), partitions(b), head_partials(b, kv_head, from));
      }
      first += a_.num_kv_heads;
      from += partial_floats(b);
    }
  }

  const AttentionArgs& a_;
  Team& team_;
  const Selection<Dot>* selection_;  // null: everything is read
  const int group_;
  const AttentionScratch& plan_;
  float* partials_;
  Worker<Dot> worker_;
};

template <class Dot>
void attend(const AttentionArgs& args, Team& team, int64_t longest) {
  const AttentionScratch plan(args.num_seqs, longest, args.num_heads, args.head_dim);
  float* scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(args.scratch) + 63) & ~uintptr_t{63});
  if (!args.selection) return Schedule<Dot>(args, team, plan, scratch, nullptr).run();
  Selection<Dot> selection(args, team, longest);
  selection.run();
  Schedule<Dot>(args, team, plan, scratch, &selection).run();
}

}  // namespace

// Called right after a barrier; returns behind one.
void attention(const AttentionArgs& args, Team& team) {
  int64_t longest = 0;
  for (int b = 0; b < args.num_seqs; ++b) longest = larger<int64_t>(longest, args.context_lens[b]);
  switch (args.kv_type) {
    case DType::bf16: return attend<Bf16Dot>(args, team, longest);
    case DType::f16: return attend<F16Dot>(args, team, longest);
    case kI8: return attend<I8Dot>(args, team, longest);
    default: return attend<F32Dot>(args, team, longest);
  }
}

}  // namespace etserve::cpu::ETSERVE_ISA
