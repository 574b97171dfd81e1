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

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

constexpr int kBlockSize = 16;
constexpr int kPartitionTokens = 512;  // attention reduces in partitions of this many positions, whatever the batch

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
  // matrix products, norms, RoPE and the decoder's own kernels are added by decoder.h
};

int64_t attention_scratch_floats(int64_t num_tokens, int num_seqs, int max_context, int num_heads, int head_dim,
                                 int team_size);
int64_t row_pass_scratch_bytes(int64_t rows, int64_t vocab, int k, int team_size);
int64_t sample_scratch_bytes(int64_t vocab, int team_size);

}  // namespace etserve::cpu
