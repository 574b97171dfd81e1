// The CUDA kernels behind a plain C ABI: structs of raw pointers in, one launcher per kernel.
//
// Every pointer is device memory (host memory in the emulator, csrc/cuda/emulation.h, which exports the same names).
// A launcher takes a cudaStream_t as `void*`, returns at once, and returns 0 or a cudaError_t; it checks what the kernel
// relies on and cannot see in a pointer, and leaves dtypes and shapes to the binding (etserve/kernels/cuda.py). No
// result depends on batch mates: every reduction has one order, fixed by the row or sequence alone.
//
// KV cache of one layer: [num_blocks][2][num_kv_heads][16][head_dim], index 0 keys, 1 values; block = 16 tokens.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

enum { ETSERVE_F32 = 0, ETSERVE_BF16 = 1, ETSERVE_F16 = 2 };

// One pass over raw logits. Nats. Semantics: etserve/kernels/reference_rows.py, reference_row_pass.
typedef struct {
  const void* logits;  // [rows][stride] of dtype
  int32_t dtype;       // any of the three
  int32_t k;           // 0 .. 64 likeliest tokens wanted
  int64_t rows, vocab, stride;  // vocab 1 .. 2^20
  float* log_sum_exp;  // [rows]
  float* entropy;      // [rows]; NaN where the row holds NaN or +inf, or nothing but -inf
  float* varentropy;   // [rows]; likewise
  int32_t* argmax;     // [rows]; lowest id among equals, -1 without a finite entry
  int32_t* nonfinite;  // [rows] count of NaN and +inf entries
  float* top_values;   // [rows][k], descending, ties by lower id; -inf where fewer than k are finite
  int32_t* top_ids;    // [rows][k]; -1 there
  void* scratch;       // etserve_cuda_row_pass_scratch_bytes(rows, vocab, k), aligned to 16
} EtserveRowPass;
int etserve_cuda_row_pass(const EtserveRowPass* args, void* stream);
int64_t etserve_cuda_row_pass_scratch_bytes(int64_t rows, int64_t vocab, int32_t k);

// One draw per row. Semantics: etserve/kernels/reference_rows.py, truncated and reference_sample. Weights relative to
// the likeliest token are rounded to 2^-40, so sums are exact whatever their order; lighter tokens are never drawn.
typedef struct {
  const void* logits;  // [rows][stride] of dtype, penalties and masks applied
  int32_t dtype;       // any of the three
  int64_t rows, vocab, stride;  // vocab 1 .. 2^20
  const float* temperature;  // [rows], > 0
  const int32_t* top_k;      // [rows], 0: off
  const float* top_p;        // [rows], 1: off
  const float* min_p;        // [rows], 0: off
  const double* uniform;     // [rows], in [0, 1)
  int32_t* token_ids;        // [rows]; -1 where the row holds NaN or +inf, or nothing but -inf
  float* sampled_entropy;    // [rows], nats, of the distribution drawn from; NaN there
} EtserveSample;
int etserve_cuda_sample(const EtserveSample* args, void* stream);

// out = x / sqrt(mean(x^2) + eps) * weight over the last axis. f32 inside.
typedef struct {
  const void* x;       // [rows][size] of dtype
  const void* weight;  // [size] of dtype
  void* out;           // [rows][size] of dtype; may be x
  int32_t dtype;
  int64_t rows, size;
  float eps;
} EtserveRmsNorm;
int etserve_cuda_rms_norm(const EtserveRmsNorm* args, void* stream);

// out = silu(gate) * up. f32 inside.
typedef struct {
  const void* gate;  // [rows][stride] of dtype, the first `size` of each row
  const void* up;    // likewise
  void* out;         // [rows][size]; may be either where stride is size
  int32_t dtype;
  int64_t rows, size, stride;
} EtserveSiluMul;
int etserve_cuda_silu_mul(const EtserveSiluMul* args, void* stream);

// Rotates q and k (NeoX halves of the first rotary_dim dimensions), writes q out and k, v into the cache. f32 inside.
typedef struct {
  const void* qkv;           // [tokens][(num_heads + 2 num_kv_heads) head_dim] of dtype
  int32_t dtype;             // also of q and of the cache
  int32_t num_heads, num_kv_heads;
  int32_t head_dim;          // 2 .. 256, even
  int32_t rotary_dim;        // even, at most head_dim
  int64_t tokens;
  const int32_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens], block * 16 + offset, all different; < 0: k and v are not written
  const float* cos;          // [max_position][rotary_dim / 2]
  const float* sin;          // likewise
  const void* q_norm;        // null, or RMSNorm weights [head_dim] of dtype, applied before the rotation
  const void* k_norm;        // null exactly where q_norm is
  float eps;
  void* q;                   // [tokens][num_heads][head_dim] of dtype
  void* kv;                  // one layer's cache
} EtserveRope;
int etserve_cuda_rope_and_write(const EtserveRope* args, void* stream);

// Key sketches of the blocks whose last token is among this step's, from the keys in the cache; after rope_and_write.
// Layout: csrc/cuda/sketch.h. Semantics: etserve/kernels/reference_sketch.py.
typedef struct {
  const void* kv;  // one layer's cache
  int32_t dtype;   // any
  int32_t bits;    // 1 or 2 per dimension
  int32_t num_kv_heads;
  int32_t head_dim;      // a multiple of 8 in 8 .. 256
  int64_t tokens;
  const int64_t* slots;  // [tokens], as in EtserveRope
  const float* signs;    // [head_dim], of the rotation
  void* sketches;        // [num_blocks][num_kv_heads][etserve_cuda_sketch_bytes(head_dim, bits)]
} EtserveSketch;
int etserve_cuda_sketch(const EtserveSketch* args, void* stream);
int64_t etserve_cuda_sketch_bytes(int32_t head_dim, int32_t bits);

// Which blocks each KV head of a sequence reads. Semantics: etserve/kernels/reference_selection.py.
typedef struct {
  const void* q;   // [num_seqs][num_heads][head_dim] of dtype, one row per sequence
  const void* kv;  // one layer's cache
  int32_t dtype, bits;  // bits of the sketches, 1 or 2
  int32_t num_seqs, max_blocks, num_heads, num_kv_heads;
  int32_t head_dim;  // a multiple of 8 in 8 .. 256
  int32_t selector;  // 0 sketch, 1 random, 2 recency; the last two want no sketches
  int32_t sink_blocks, recent_blocks, min_kept_blocks, min_context;  // guards: kernels/selection.py, SelectionRule
  float scale;
  double share, min_kept_share;
  uint64_t seed;
  const int32_t* block_tables;   // [num_seqs][max_blocks]
  const int32_t* context_lens;   // [num_seqs]
  const void* sketches;          // as in EtserveSketch
  const float* signs;            // [head_dim]
  const float* epsilon;          // [num_seqs], 0: dense
  const uint8_t* is_protected;   // null, or [num_seqs][max_blocks]: always read
  float* log_mass;               // [num_seqs][num_heads][max_blocks], scratch
  uint32_t* keys;                // [num_seqs][num_kv_heads][max_blocks], scratch
  int32_t* kept;                 // [num_seqs][num_kv_heads][max_blocks], out: ascending
  int32_t* num_kept;             // [num_seqs][num_kv_heads], out
  float* missing;                // [num_seqs][num_kv_heads], out: estimated mass skipped; NaN where a placebo skips
  float* estimated_mass;         // null, or [num_seqs][num_kv_heads][max_blocks]: what was cut by; NaN where nothing was
} EtserveSelect;
int etserve_cuda_select(const EtserveSelect* args, void* stream);

// Attention of one query row per sequence over its paged context, split into partitions of 512 positions.
typedef struct {
  const void* q;   // [num_seqs][num_heads][head_dim] of dtype, rotated; `scale` is applied inside
  void* out;       // like q
  const void* kv;  // one layer's cache
  int32_t dtype;   // any, of all three
  int32_t num_seqs, max_blocks, num_heads, num_kv_heads;
  int32_t head_dim;  // a multiple of 8 in 8 .. 256
  int32_t window;    // > 0: only the last `window` positions
  float scale;
  const int32_t* block_tables;  // [num_seqs][max_blocks]
  const int32_t* context_lens;  // [num_seqs], at most 16 max_blocks; 0: a padding row, its output is 0
  const int32_t* kept;      // null: all blocks; or EtserveSelect.kept (then window is 0)
  const int32_t* num_kept;  // null where kept is
  float* block_mass;     // null, or [num_seqs][num_heads][max_blocks]: exact softmax mass of each block among those read
  float* log_sum_exp;    // null, or [num_seqs][num_heads]
  void* scratch;         // etserve_cuda_decode_scratch_bytes(...), aligned to 16
} EtserveDecode;
int etserve_cuda_decode_attention(const EtserveDecode* args, void* stream);
int64_t etserve_cuda_decode_scratch_bytes(int32_t num_seqs, int32_t max_blocks, int32_t num_heads, int32_t head_dim);

// Largest exact mass of each block over the heads of one layer, into that of the step so far.
typedef struct {
  int32_t num_seqs, max_blocks, num_heads;
  const float* block_mass;  // [num_seqs][num_heads][max_blocks]
  float* step_mass;         // [num_seqs][max_blocks], 0 before the first layer; NaN: unknown, and stays so
} EtserveFoldMass;
int etserve_cuda_fold_mass(const EtserveFoldMass* args, void* stream);

// Takes a step's masses into the averages, then up to num_wanted blocks of each sequence out of its arrays.
// Arrays [num_seqs][max_blocks] describe the blocks a sequence holds, in its first num_held entries.
typedef struct {
  int32_t num_seqs, max_blocks;
  int32_t sink_blocks, recent_blocks, min_kept_blocks;  // guards: etserve/control/eviction.py, EvictionConfig
  float mass_decay;
  double min_kept_share;
  float* step_mass;        // [num_seqs][max_blocks], read and set to 0
  int32_t* block_tables;   // [num_seqs][max_blocks] block ids
  int32_t* block_index;    // likewise: place in the whole sequence, evicted blocks counted
  float* mass_weighted;    // likewise: MassAverage.weighted
  float* mass_weight;      // likewise: MassAverage.weight
  float* surprisal;        // likewise: nats, mean over the block's tokens; NaN: never measured
  uint8_t* is_protected;   // likewise
  int32_t* num_held;       // [num_seqs], reduced
  const int32_t* num_sequence_blocks;  // [num_seqs], evicted ones counted
  const int32_t* num_wanted;           // [num_seqs]
  const int32_t* num_refs;   // [num_blocks]
  const uint8_t* is_cached;  // [num_blocks]
  int32_t* evicted;      // [num_seqs][max_blocks], out: ids in the order of eviction
  int32_t* num_evicted;  // [num_seqs], out
  int32_t* free_list;    // ids; room for all of them
  int32_t* num_free;     // [1], raised
  double* scratch;       // [num_seqs][max_blocks]
  int32_t* ranks;        // [num_seqs][max_blocks], scratch
} EtserveEvict;
int etserve_cuda_evict(const EtserveEvict* args, void* stream);

const char* etserve_cuda_error_string(int code);
int etserve_cuda_is_emulated(void);
void etserve_cuda_set_emulation_seed(uint64_t seed);  // order of blocks, warps and lanes; nothing on a device

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
