// Sketches of full blocks: the mean key, and each token's rotated difference from it in 1 or 2 bits a dimension.
// A vector register holds one dimension of the block's 16 tokens, so that nothing is reduced across lanes but the mean.
#include "kv_layout.h"
#include "rotate.h"
#include "simd.h"
#include "sketch_plan.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

constexpr int kMaxSketchDim = 256;

void load_bytes(const int8_t* from, int dim, float* keys) {
  const float* scales = reinterpret_cast<const float*>(from + kBlockSize * dim);
  for (int d = 0; d < dim; ++d)
    for (int t = 0; t < kBlockSize; ++t)
      keys[d * kBlockSize + t] = static_cast<float>(from[d / 4 * (4 * kBlockSize) + 4 * t + d % 4]) * scales[t];
}

void load_halves(const uint16_t* from, int dim, bool is_bf16, float* keys) {
  for (int d = 0; d < dim; ++d)
    for (int t = 0; t < kBlockSize; ++t) {
      const uint16_t half = from[d / 2 * (2 * kBlockSize) + 2 * t + d % 2];
      keys[d * kBlockSize + t] = is_bf16 ? from_bf16(half) : from_f16(half);
    }
}

// keys[16 d + t] of one KV head of one block, as f32.
void load_keys(const SketchArgs& a, int64_t block, int kv_head, float* keys) {
  const int64_t at = block * 2 * a.num_kv_heads + kv_head;
  const char* head = static_cast<const char*>(a.kv) + at * kv_head_bytes(a.head_dim, a.kv_type);
  if (a.kv_type == DType::f32)
    std::memcpy(keys, head, sizeof(float) * kBlockSize * static_cast<size_t>(a.head_dim));
  else if (a.kv_type == kI8)
    load_bytes(reinterpret_cast<const int8_t*>(head), a.head_dim, keys);
  else
    load_halves(reinterpret_cast<const uint16_t*>(head), a.head_dim, a.kv_type == DType::bf16, keys);
}

// Subtracts the mean as it is stored, and turns the differences by R.
void centre_and_rotate(float* keys, const float* signs, int dim, uint16_t* mean) {
  for (int d = 0; d < dim; ++d) {
    float* row = keys + d * kBlockSize;
    mean[d] = to_bf16(reduce_add(load(row)) * (1.0f / kBlockSize));
    store(row, mul(sub(load(row), set1(from_bf16(mean[d]))), set1(signs[d])));
  }
  hadamard(dim, [=](int i, int j) {
    const F x = load(keys + i * kBlockSize), y = load(keys + j * kBlockSize);
    store(keys + i * kBlockSize, add(x, y));
    store(keys + j * kBlockSize, sub(x, y));
  });
  const F norm = set1(hadamard_norm(dim));
  for (int d = 0; d < dim; ++d) store(keys + d * kBlockSize, mul(load(keys + d * kBlockSize), norm));
}

void write_codes(const SketchLayout& layout, const float* x, const float* rms, uint32_t* lines) {
  std::memset(lines, 0, 64 * static_cast<size_t>(layout.lines));
  float outer[kBlockSize];
  for (int t = 0; t < kBlockSize; ++t) outer[t] = kOuterThreshold * rms[t];
  for (int d = 0; d < layout.head_dim; ++d, x += kBlockSize) {
    const int shift = 8 * (d % 4) + layout.bits * (d % layout.dims_per_line / 4);
    uint32_t* line = lines + d / layout.dims_per_line * 16;
    for (int t = 0; t < kBlockSize; ++t) {
      uint32_t code = x[t] > 0.0f;
      if (layout.bits == 2) code += static_cast<uint32_t>(x[t] > -outer[t]) + static_cast<uint32_t>(x[t] > outer[t]);
      line[t] |= code << shift;
    }
  }
}

void write_sketch(const SketchArgs& a, const SketchLayout& layout, int64_t block, int kv_head) {
  alignas(64) float keys[kMaxSketchDim * kBlockSize];
  char* to = static_cast<char*>(a.sketches) + (block * a.num_kv_heads + kv_head) * layout.num_bytes;
  uint16_t* mean = reinterpret_cast<uint16_t*>(to + layout.mean_at);
  uint16_t* scales = reinterpret_cast<uint16_t*>(to + layout.scales_at);
  load_keys(a, block, kv_head, keys);
  centre_and_rotate(keys, a.signs, a.head_dim, mean);
  for (int d = a.head_dim; d < layout.padded_dim; ++d) mean[d] = 0;
  F squares = zero();
  for (int d = 0; d < a.head_dim; ++d) {
    const F x = load(keys + d * kBlockSize);
    squares = fma(x, x, squares);
  }
  float rms[kBlockSize];
  store(rms, squares);
  for (int t = 0; t < kBlockSize; ++t) {
    rms[t] = __builtin_sqrtf(rms[t] / static_cast<float>(a.head_dim));
    scales[t] = to_bf16(rms[t]);
  }
  write_codes(layout, keys, rms, reinterpret_cast<uint32_t*>(to));
}

}  // namespace

void write_sketches(const SketchArgs& args, Team& team) {
  const SketchLayout layout(args.head_dim, args.bits);
  int64_t begin, end;
  team.split(args.num_blocks * args.num_kv_heads, 1, &begin, &end);
  for (int64_t item = begin; item < end; ++item)
    write_sketch(args, layout, args.blocks[item / args.num_kv_heads], static_cast<int>(item % args.num_kv_heads));
}

}  // namespace etserve::cpu::ETSERVE_ISA
