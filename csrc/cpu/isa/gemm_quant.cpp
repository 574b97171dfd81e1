// y = x W^T over quantised weights: 8-bit activations, exact int32 sums in blocks of 32, f32 over blocks. See quant.h.
#include "quant_tile.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

struct WideFormat {  // q8_0
  static constexpr bool kIsWide = true, kHasMin = false;
  static constexpr int64_t kHeader = 64, kBlock = 512, kRecord = 1088;
};
struct NibbleFormat {  // q4_0
  static constexpr bool kIsWide = false, kHasMin = false;
  static constexpr int64_t kHeader = 64, kBlock = 256, kRecord = 576;
};
struct MinFormat {  // q4_1
  static constexpr bool kIsWide = false, kHasMin = true;
  static constexpr int64_t kHeader = 128, kBlock = 256, kRecord = 640;
};

// All products of one block: `w` points to its bytes in the first panel.
template <class F, int ROWS, int PANELS>
ETSERVE_INLINE void dot_block(Ints (&sums)[ROWS][PANELS], const char* w, int64_t panel_bytes, int64_t ahead,
                              const RowPointers<ROWS>& x) {
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; g += F::kIsWide ? 1 : 2) {
    Bytes loaded[PANELS], part[PANELS];
#pragma GCC unroll 4
    for (int j = 0; j < PANELS; ++j) {
      const char* line = w + j * panel_bytes + g * (F::kBlock / kGroups);
      fetch_ahead<PANELS>(line + ahead);
      loaded[j] = load_weight_bytes(line);
    }
    if constexpr (F::kIsWide) {
      dot_group<F::kIsWide>(sums, loaded, x, g * 4);
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < PANELS; ++j) part[j] = low_nibbles(loaded[j]);
      dot_group<F::kIsWide>(sums, part, x, g * 4);
#pragma GCC unroll 4
      for (int j = 0; j < PANELS; ++j) part[j] = high_nibbles(loaded[j]);
      dot_group<F::kIsWide>(sums, part, x, g * 4 + 4);
    }
  }
}

template <class F>
struct QuantKernel {
  using Corner = QuantTile;
  static constexpr int kStream = kQuantStreamRows, kRows2 = kQuantRows2, kRows4 = kQuantRows4;

  template <int ROWS, int PANELS>
  static void sum(const QuantTile& t, float* sums, int pitch) {
    const int64_t panel_bytes = t.panel_bytes, blocks = t.x->blocks;
    RowPointers<ROWS> x(t);
    const BlockMeta* metas = t.x->metas + t.row * blocks;
    Vec acc[ROWS][PANELS];
    clear(acc);
    const int64_t ahead = fetch_distance<PANELS>(panel_bytes);
    const char* record = t.w;
    for (int64_t b = 0; b < blocks; ++b, ++metas) {
      const int64_t half = b % 2;
      Ints ints[ROWS][PANELS];
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
        const Ints start = ints_set(F::kHasMin ? 0 : metas[i * blocks].start);
#pragma GCC unroll 4
        for (int j = 0; j < PANELS; ++j) ints[i][j] = start;
      }
      dot_block<F>(ints, record + F::kHeader + half * F::kBlock, panel_bytes, ahead, x);
#pragma GCC unroll 4
      for (int j = 0; j < PANELS; ++j) {
        const char* header = record + j * panel_bytes + half * 32;
        const Vec scale = load_f16(reinterpret_cast<const uint16_t*>(header));
        const Vec minimum = F::kHasMin ? load_f16(reinterpret_cast<const uint16_t*>(header + 64)) : scale;
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
          const BlockMeta& meta = metas[i * blocks];
          acc[i][j] = vec_fma(to_floats(ints[i][j]), vec_mul(scale, vec_set(meta.scale)), acc[i][j]);
          if (F::kHasMin) acc[i][j] = vec_fma(minimum, vec_set(meta.sum), acc[i][j]);
        }
      }
      x.advance();
      record += half ? F::kRecord : 0;
    }
    store_sums(acc, sums, pitch);
  }
};

}  // namespace

void matmul_quantised(const MatmulArgs& args, Team& team) {
  switch (args.w.type) {
    case DType::q8_0: return walk_quantised<QuantKernel<WideFormat>>(args, team);
    case DType::q4_0: return walk_quantised<QuantKernel<NibbleFormat>>(args, team);
    case DType::q4_1: return walk_quantised<QuantKernel<MinFormat>>(args, team);
    default: return matmul_super(args, team);
  }
}

}  // namespace etserve::cpu::ETSERVE_ISA
