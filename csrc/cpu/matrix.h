// Matrix products over packed weights: y[M, N] = x[M, K] W[N, K]^T (+ bias), f32 accumulation.
//
// A packed matrix is made of panels of 16 output columns, so that one vector register holds 16 outputs:
//   bf16  [panel][ceil(K/2)][16][2]   pairs along K, as vdpbf16ps eats them; activations are bf16
//   f32   [panel][K][16]              activations are f32
//   f16   [panel][K][16]              converted when loaded, activations are f32
// N is padded to 16 and (bf16) K to 2 with zeros. A paired matrix holds two of the same shape, panel by panel in turn
// (gate, up, gate, up, ...), so that one tile has both halves of silu(gate) * up.
//
//   q8_0, q4_0, q4_1, q4_k, q5_k, q6_k   see quant.h: 4 to 8 bits a weight, a scale (and a minimum) for 32 or 16 along K;
//                                        activations are f32 or bf16, rounded to 8 bits on the way
//
// Every output is one chain of multiply-adds over ascending k, whatever M, the tile or the thread: a row's result does
// not depend on its batch.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace etserve::cpu {

constexpr int kPanel = 16;

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
inline bool is_quantised(DType type) { return type >= DType::q8_0; }

// A format's block as ggml has it, and the record of a packed panel: weights along K, and bytes.
struct QuantSize {
  int64_t block_weights, block_bytes, record_weights, record_bytes;
};
inline QuantSize quant_size(DType type) {
  constexpr QuantSize kSizes[] = {{32, 34, 64, 1088},     {32, 18, 64, 576},      {32, 20, 64, 640},
                                  {256, 144, 256, 2368}, {256, 176, 256, 2880}, {256, 210, 256, 3392}};
  return kSizes[static_cast<int>(type) - static_cast<int>(DType::q8_0)];
}

struct PackedMatrix {
  const void* data = nullptr;
  DType type = DType::f32;
  int64_t n = 0, k = 0;         // outputs (of one half, if paired) and inputs
  bool paired = false;
  const float* bias = nullptr;  // null, or [n] f32 ([2][n], gate then up, if paired)
  DType input = DType::f32;     // of the activations, f32 or bf16, where the weights are quantised

  DType activation() const { return is_quantised(type) ? input : type == DType::bf16 ? DType::bf16 : DType::f32; }
  int64_t padded_k() const {
    return round_up(k, is_quantised(type) ? quant_size(type).record_weights : type == DType::bf16 ? 2 : 1);
  }
  int64_t num_panels() const { return (n + kPanel - 1) / kPanel * (paired ? 2 : 1); }
  int64_t element_size() const { return type == DType::f32 ? 4 : 2; }  // of types that are not quantised
  int64_t panel_bytes() const {
    if (!is_quantised(type)) return kPanel * padded_k() * element_size();
    return padded_k() / quant_size(type).record_weights * quant_size(type).record_bytes;
  }
  int64_t num_bytes() const { return num_panels() * panel_bytes(); }
  int64_t row_bytes() const {
    if (!is_quantised(type)) return k * element_size();
    return k / quant_size(type).block_weights * quant_size(type).block_bytes;
  }
};

enum class Epilogue : int {
  store,     // out = y, f32
  add,       // out += y, f32
  silu_mul,  // out = silu(gate) * up, of the activation type; the matrix is paired
};

struct MatmulArgs {
  const void* x;  // [m][x_stride] of w.activation(); for bf16, x_stride >= padded_k and the padding is zero
  int64_t m, x_stride;
  PackedMatrix w;
  Epilogue epilogue;
  void* out;  // [m][out_stride]
  int64_t out_stride;
  void* scratch = nullptr;  // quant_scratch_bytes(m, w.k, team size) for quantised weights, aligned to 64
};

struct NormArgs {
  const float* x;  // [rows][x_stride]
  int64_t rows, size, x_stride;
  const float* weight;  // [size]
  float eps;
  void* out;  // [rows][out_stride], f32 or bf16
  DType out_type;
  int64_t out_stride;
};

// Splits the rows of a fused q, k, v product: q and k are normed (optional) and rotated, k and v go to the paged cache.
struct RopeArgs {
  const float* qkv;  // [tokens][(num_heads + 2 num_kv_heads) * head_dim]
  int64_t tokens;
  int num_heads, num_kv_heads, head_dim, rotary_dim;  // the two halves of the first rotary_dim dims rotate (NeoX)
  const float* cos;  // [max_position][rotary_dim / 2]
  const float* sin;
  const int32_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens]: block * 16 + position % 16
  const float* q_norm;       // null, or [head_dim]: RMSNorm before the rotation
  const float* k_norm;
  float eps;
  float* q;  // [tokens][num_heads][head_dim]
  void* kv;  // one layer's cache, layout in kernels.h
  DType kv_type;
};

struct SiluMulArgs {
  const float* gate;  // [rows][size]
  const float* up;
  int64_t rows, size;
  void* out;  // [rows][out_stride]
  DType out_type;
  int64_t out_stride;
};

struct RoundArgs {
  const float* x;  // [rows][size]
  int64_t rows, size;
  uint16_t* out;  // bf16 [rows][out_stride], padding untouched
  int64_t out_stride;
};

struct DecoderKernels {
  void (*matmul)(const MatmulArgs&, Team&);
  void (*rms_norm)(const NormArgs&, Team&);
  void (*rope_and_write)(const RopeArgs&, Team&);
  void (*silu_mul)(const SiluMulArgs&, Team&);
  void (*round_rows)(const RoundArgs&, Team&);
  // Machine ceilings. Both return a value that depends on the work, so that it is not optimised away.
  float (*dot_in_registers)(DType type, int64_t iterations);  // dot_flops(type) operations an iteration
  float (*read_bytes)(const void* data, int64_t num_bytes);   // num_bytes a multiple of 1024
};

constexpr int kDotChains = 12;  // independent accumulators: covers the latency of two pipes
inline double dot_flops(DType type) { return kDotChains * 16.0 * 2.0 * (type == DType::bf16 ? 2.0 : 1.0); }

// Copy `rows` rows of a row-major [rows][k] matrix into a packed one, from its row `first` on; `half` 1 is the second
// matrix of a pair. The destination starts zeroed. Quantised rows are ggml's blocks, row_bytes() a row.
void pack_rows(const PackedMatrix& packed, void* data, const void* rows_data, int64_t rows, int64_t first, int half);

// One row of an (unpaired) packed matrix, as f32.
void unpack_row(const PackedMatrix& packed, int64_t row, float* out);

}  // namespace etserve::cpu
