// The CPU kernels: plain structs of raw pointers in, one function per kernel, run by every member of a team.
//
// Each kernel is compiled once per instruction set (namespace ETSERVE_ISA: generic, avx2, avx512) and reached through
// the table below, chosen at start. Checks of shapes and dtypes are the binding's business (etserve/kernels/ops.py).
//
// KV cache of one layer: [num_blocks][2][num_kv_heads][16 * head_dim], block = 16 tokens, index 0 keys, 1 values.
//   f32   keys   [head_dim][16]         values [16][head_dim]
//   bf16  keys   [head_dim/2][16][2]    values [8][head_dim][2]    (pairs along the reduced axis, as vdpbf16ps eats them)
#pragma once
#include <cstdint>

#include "threads.h"

namespace etserve::cpu {

// From q8_0 on: weights only, see quant.h.
enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, q8_0 = 3, q4_0 = 4, q4_1 = 5, q4_k = 6, q5_k = 7, q6_k = 8 };

constexpr int kBlockSize = 16;
constexpr int kPartitionTokens = 512;  // attention reduces in partitions of this many positions, whatever the batch

enum class Selector : int { sketch = 0, random = 1, recency = 2 };  // the last two are placebos

// Guards and gains of a selection, the same for all sequences (etserve/kernels/selection.py).
struct SelectionRule {
  Selector selector;  // random and recency need no sketches: epsilon > 0 only switches them on
  double share;       // of the blocks that random and recency read
  uint64_t seed;      // of random
  int sink_blocks, recent_blocks, min_kept_blocks;  // recent_blocks >= 1
  double min_kept_share;
  int min_context, dense_layers;
};

// Which blocks a sequence's only query row reads, per KV head. What is not full has no sketch and is read always; a
// sequence with several query rows, or below min_context, reads all.
struct SelectionArgs {
  SelectionRule rule;
  const void* sketches;  // one layer's [num_blocks][num_kv_heads][sketch_bytes(...)], csrc/cpu/sketch_plan.h; see bits
  int bits;              // 1 or 2
  const float* signs;    // [head_dim], +-1: the rotation
  const float* epsilon;  // [num_seqs]: estimated mass that each head may miss; 0 (or NaN): reads all
  const uint8_t* is_protected;  // null, or [num_seqs][max_blocks]: not 0 is read always
  int32_t* num_kept;            // [num_seqs][num_kv_heads]
  float* missing;               // [num_seqs][num_kv_heads]: estimated mass of what is skipped; NaN for the placebos
  float* estimated_mass;  // null, or [num_seqs][num_kv_heads][max_blocks]: what was cut by; NaN where nothing was
  float* scratch;         // selection_scratch_floats(...) floats
};

// Causal varlen attention over paged KV. Query row t of sequence b attends to positions 0 .. its own.
struct AttentionArgs {
  const float* q;  // [T][num_heads][head_dim], rotated; `scale` is applied inside
  void* out;       // [T][num_heads * head_dim], out_type (f32 or bf16)
  DType out_type;
  const void* kv;  // the layer's cache, layout above; this step's entries are already written
  DType kv_type;   // f32 or bf16
  int num_seqs;
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs], this step's tokens included
  const int32_t* block_tables;  // [num_seqs][max_blocks]
  int max_blocks;
  int num_heads, num_kv_heads, head_dim;
  float scale;
  int window;         // > 0: only the last `window` positions
  float* block_mass;  // null, or [num_seqs][num_heads][max_blocks]: softmax mass per block of each sequence's last query row
  float* scratch;     // attention_scratch_floats(...) floats
  const SelectionArgs* selection;  // null: every row reads all blocks
};

// Sketches of full blocks, from the keys in the cache: the same bits whenever and in whatever step a block fills.
struct SketchArgs {
  const void* kv;  // one layer's cache
  DType kv_type;
  void* sketches;  // one layer's
  int bits;
  const float* signs;     // [head_dim]
  const int32_t* blocks;  // [num_blocks], all different
  int64_t num_blocks;
  int num_kv_heads, head_dim;
};

// One pass over raw logits. Nats, f32 accumulation in fixed tiles merged in order: see docs/control.md, "Measuring".
struct RowPassArgs {
  const float* logits;  // [rows][stride]
  int64_t rows, vocab, stride;
  int k;                // 0 .. 64 likeliest tokens wanted
  float* log_sum_exp;   // [rows]
  float* entropy;       // [rows]; -inf entries are skipped, one finite entry gives 0, NaN or +inf gives NaN
  float* varentropy;    // [rows]
  int32_t* argmax;      // [rows]; lowest id among equals
  int32_t* nonfinite;   // [rows] count of NaN and +inf entries
  float* top_values;    // [rows][k], descending; ties by lower id
  int32_t* top_ids;     // [rows][k]; -1 where fewer than k finite entries
  void* scratch;        // row_pass_scratch_bytes(...)
};

// Draw one token per row from softmax(logits / temperature) cut by top_k, then top_p, then min_p (etserve/kernels/rows.py).
struct SampleArgs {
  const float* logits;  // [rows][stride], penalties and masks applied
  int64_t rows, vocab, stride;
  const float* temperature;  // [rows], > 0
  const int32_t* top_k;      // [rows], 0: off
  const float* top_p;        // [rows], 1: off
  const float* min_p;        // [rows], 0: off
  const double* uniform;     // [rows], in [0, 1)
  int32_t* token_ids;        // [rows]; -1 where the row holds NaN or +inf, or nothing but -inf
  float* sampled_entropy;    // [rows], entropy in nats of the distribution drawn from
  void* scratch;             // sample_scratch_bytes(...)
};

struct KernelTable {
  const char* name;  // "generic", "avx2", "avx512"
  void (*attention)(const AttentionArgs&, Team&);
  void (*row_pass)(const RowPassArgs&, Team&);
  void (*sample)(const SampleArgs&, Team&);
  void (*write_sketches)(const SketchArgs&, Team&);
  // matrix products, norms, RoPE and the decoder's own kernels are added by decoder.h
};

int64_t attention_scratch_floats(int64_t num_tokens, int num_seqs, int max_context, int num_heads, int head_dim,
                                 int team_size);
int64_t sketch_bytes(int head_dim, int bits);  // of one block and KV head
int64_t selection_scratch_floats(int num_seqs, int max_context, int num_heads, int num_kv_heads, int team_size);
int64_t row_pass_scratch_bytes(int64_t rows, int64_t vocab, int k, int team_size);
int64_t sample_scratch_bytes(int64_t vocab, int team_size);

}  // namespace etserve::cpu
