// y = x W^T over packed weights. See matrix.h for the layout and the promise about the order of reduction.
#include "walk.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

// One multiply-add step along k: how weights are loaded, activations broadcast and both combined.
struct Bf16Step {
  using X = uint16_t;
  using W = WeightBf16;
  using B = PairBf16;
  static constexpr int kDepth = 2, kBytes = 64;
  ETSERVE_INLINE W load(const char* p) { return load_bf16_pairs(reinterpret_cast<const uint16_t*>(p)); }
  ETSERVE_INLINE B broadcast(const X* p) { return broadcast_pair(p); }
  ETSERVE_INLINE Vec step(Vec acc, W w, B x) { return dot_pairs(acc, w, x); }
};

struct F32Step {
  using X = float;
  using W = Vec;
  using B = Vec;
  static constexpr int kDepth = 1, kBytes = 64;
  ETSERVE_INLINE W load(const char* p) { return vec_load(reinterpret_cast<const float*>(p)); }
  ETSERVE_INLINE B broadcast(const X* p) { return vec_set(*p); }
  ETSERVE_INLINE Vec step(Vec acc, W w, B x) { return vec_fma(w, x, acc); }
};

struct F16Step : F32Step {
  static constexpr int kBytes = 32;
  ETSERVE_INLINE W load(const char* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
};

template <class S>
struct FloatKernel {
  using Corner = Tile;
  static constexpr int kStream = kStreamRows, kRows2 = kMaxRows2, kRows4 = kMaxRows4;

  template <int ROWS, int PANELS>
  static void sum(const Tile& t, float* sums, int pitch) {
    constexpr int kBases = (ROWS + 2) / 3;
    const MatmulArgs& a = *t.args;
    const int64_t stride = a.x_stride * static_cast<int64_t>(sizeof(typename S::X)), panel_bytes = t.panel_bytes;
    const char* x[kBases];
#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) x[i] = static_cast<const char*>(a.x) + (t.row + 3 * i) * stride;
    Vec acc[ROWS][PANELS];
    clear(acc);
    const int64_t ahead = fetch_distance<PANELS>(panel_bytes);
    const char* w = t.w;
    for (int64_t s = a.w.padded_k() / S::kDepth; s > 0; --s, w += S::kBytes) {
      typename S::W weights[PANELS];
#pragma GCC unroll 4
      for (int j = 0; j < PANELS; ++j) {
        fetch_ahead<PANELS>(w + j * panel_bytes + ahead);
        weights[j] = S::load(w + j * panel_bytes);
      }
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
        const auto value = S::broadcast(reinterpret_cast<const typename S::X*>(x[i / 3] + i % 3 * stride));
#pragma GCC unroll 4
        for (int j = 0; j < PANELS; ++j) acc[i][j] = S::step(acc[i][j], weights[j], value);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kBases; ++i) {
        x[i] += S::kDepth * sizeof(typename S::X);
        keep_in_register(x[i]);
      }
    }
    store_sums(acc, sums, pitch);
  }
};

template <class S>
void matmul_with(const MatmulArgs& a, Team& team) {
  walk_matrix<FloatKernel<S>>({&a, static_cast<const char*>(a.w.data), a.w.panel_bytes(), 0, 0}, team);
}

}  // namespace

void matmul(const MatmulArgs& args, Team& team) {
  switch (args.w.type) {
    case DType::bf16: return matmul_with<Bf16Step>(args, team);
    case DType::f32: return matmul_with<F32Step>(args, team);
    case DType::f16: return matmul_with<F16Step>(args, team);
    default: return matmul_quantised(args, team);
  }
}

float dot_in_registers(DType type, int64_t iterations) {
  Vec acc[kDotChains];
  for (int i = 0; i < kDotChains; ++i) acc[i] = vec_set(static_cast<float>(i));
  alignas(64) uint16_t ones[32];
  for (uint16_t& v : ones) v = to_bf16(1e-3f);
  const WeightBf16 pairs = load_bf16_pairs(ones);
  const PairBf16 pair = broadcast_pair(ones);
  const Vec weight = vec_set(1e-3f), value = vec_set(1e-3f);
  if (type == DType::bf16) {
    for (int64_t n = 0; n < iterations; ++n)
#pragma GCC unroll 12
      for (int i = 0; i < kDotChains; ++i) acc[i] = dot_pairs(acc[i], pairs, pair);
  } else {
    for (int64_t n = 0; n < iterations; ++n)
#pragma GCC unroll 12
      for (int i = 0; i < kDotChains; ++i) acc[i] = vec_fma(weight, value, acc[i]);
  }
  Vec sum = vec_set(0.0f);
  for (int i = 0; i < kDotChains; ++i) sum = vec_add(sum, acc[i]);
  return vec_sum(sum);
}

float read_bytes(const void* data, int64_t num_bytes) {
  Vec acc[4] = {vec_set(0.0f), vec_set(0.0f), vec_set(0.0f), vec_set(0.0f)};
  const float* p = static_cast<const float*>(data);
  for (const float* end = p + num_bytes / 4; p < end; p += 64) {
    prefetch(p + 256);
    prefetch(p + 272);
    prefetch(p + 288);
    prefetch(p + 304);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[i] = vec_add(acc[i], vec_load(p + 16 * i));
  }
  return vec_sum(vec_add(vec_add(acc[0], acc[1]), vec_add(acc[2], acc[3])));
}

}  // namespace etserve::cpu::ETSERVE_ISA
