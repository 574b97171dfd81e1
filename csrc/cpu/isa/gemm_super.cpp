// y = x W^T over weights in super-blocks of 256 (q4_k, q5_k, q6_k). See quant.h for the layout and the order of sums.
#include "quant_tile.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

struct Format4K {
  static constexpr int kHighBits = 0, kParts = 1;
  static constexpr int64_t kBlock = 256, kRecord = 2368;
};
struct Format5K {
  static constexpr int kHighBits = 1, kParts = 1;
  static constexpr int64_t kBlock = 320, kRecord = 2880;
};
struct Format6K {
  static constexpr int kHighBits = 2, kParts = 2;  // scales for 16 instead of 32 with a minimum
  static constexpr int64_t kBlock = 384, kRecord = 3392;
};

constexpr int64_t kNibbleBytes = 256;  // of a block, before its high bits

// Groups G and G + 1 of a block, whole.
template <class F, int G>
ETSERVE_INLINE void load_groups(const char* block, Bytes* even, Bytes* odd) {
  const Bytes nibbles = load_weight_bytes(block + G / 2 * 64);
  *even = low_nibbles(nibbles);
  *odd = high_nibbles(nibbles);
  if constexpr (F::kHighBits == 1) {
    const Bytes bits = load_weight_bytes(block + kNibbleBytes);
    *even = join(*even, move_bits<G, 4>(bits, 0x10));
    *odd = join(*odd, move_bits<G + 1, 4>(bits, 0x10));
  } else if constexpr (F::kHighBits == 2) {
    const Bytes bits = load_weight_bytes(block + kNibbleBytes + G / 4 * 64);
    *even = join(*even, move_bits<G % 4 * 2, 4>(bits, 0x30));
    *odd = join(*odd, move_bits<G % 4 * 2 + 2, 4>(bits, 0x30));
  }
}

// Adds the products of groups G .. END - 1 of a block; `w` points to it in the first panel.
template <class F, int G, int END, int ROWS, int PANELS>
ETSERVE_INLINE void dot_groups(Ints (&sums)[ROWS][PANELS], const char* w, int64_t panel_bytes, int64_t ahead,
                               const RowPointers<ROWS>& x) {
  if constexpr (G < END) {
    Bytes even[PANELS], odd[PANELS];
#pragma GCC unroll 4
    for (int j = 0; j < PANELS; ++j) {
      const char* block = w + j * panel_bytes;
      fetch_ahead<PANELS>(block + G * (F::kBlock / kGroups) + ahead);
      load_groups<F, G>(block, even + j, odd + j);
    }
    dot_group<false>(sums, even, x, G * 4);
    dot_group<false>(sums, odd, x, G * 4 + 4);
    dot_groups<F, G + 2, END>(sums, w, panel_bytes, ahead, x);
  }
}

// Adds part PART of block `b` of the record to the sums of all rows and panels.
template <class F, int PART, int ROWS, int PANELS>
ETSERVE_INLINE void add_part(Vec (&acc)[ROWS][PANELS], const char* record, int64_t b, int64_t panel_bytes,
                             int64_t ahead, const RowPointers<ROWS>& x, const BlockMeta* metas, int64_t meta_stride) {
  constexpr int kFirst = kGroups / F::kParts * PART, kEnd = kGroups / F::kParts * (PART + 1);
  constexpr bool kHasMin = F::kParts == 1;
  Ints sums[ROWS][PANELS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
    const Ints start = ints_set(kHasMin ? 0 : -32 * metas[i * meta_stride].halves[PART]);
#pragma GCC unroll 4
    for (int j = 0; j < PANELS; ++j) sums[i][j] = start;
  }
  dot_groups<F, kFirst, kEnd>(sums, record + kSuperQuants + b * F::kBlock, panel_bytes, ahead, x);
#pragma GCC unroll 4
  for (int j = 0; j < PANELS; ++j) {
    const char* panel = record + j * panel_bytes;
    const char* small = panel + kSuperScales + (b * F::kParts + PART) * kPanel;
    const Vec scale = vec_mul(load_f16(reinterpret_cast<const uint16_t*>(panel)), kHasMin ? load_u8(small) : load_i8(small));
    const Vec minimum = kHasMin ? vec_mul(load_f16(reinterpret_cast<const uint16_t*>(panel + 32)), load_u8(small + 128)) : scale;
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      const BlockMeta& meta = metas[i * meta_stride];
      acc[i][j] = vec_fma(to_floats(sums[i][j]), vec_mul(scale, vec_set(meta.scale)), acc[i][j]);
      if (kHasMin) acc[i][j] = vec_fma(minimum, vec_set(meta.sum), acc[i][j]);
    }
  }
}

template <class F>
struct SuperKernel {
  using Corner = QuantTile;
  static constexpr int kStream = kQuantStreamRows, kRows2 = kQuantRows2, kRows4 = kQuantRows4;

  template <int ROWS, int PANELS>
  static void sum(const QuantTile& t, float* sums, int pitch) {
    const int64_t panel_bytes = t.panel_bytes, blocks = t.x->blocks, ahead = fetch_distance<PANELS>(panel_bytes);
    RowPointers<ROWS> x(t);
    const BlockMeta* metas = t.x->metas + t.row * blocks;
    Vec acc[ROWS][PANELS];
    clear(acc);
    const char* record = t.w;
    for (int64_t left = blocks / (kSuperBlock / kQuantBlock); left > 0; --left, record += F::kRecord)
      for (int64_t b = 0; b < kSuperBlock / kQuantBlock; ++b, ++metas) {
        add_part<F, 0>(acc, record, b, panel_bytes, ahead, x, metas, blocks);
        if constexpr (F::kParts == 2) add_part<F, 1>(acc, record, b, panel_bytes, ahead, x, metas, blocks);
        x.advance();
      }
    store_sums(acc, sums, pitch);
  }
};

}  // namespace

void matmul_super(const MatmulArgs& args, Team& team) {
  switch (args.w.type) {
    case DType::q4_k: return walk_quantised<SuperKernel<Format4K>>(args, team);
    case DType::q5_k: return walk_quantised<SuperKernel<Format5K>>(args, team);
    case DType::q6_k: return walk_quantised<SuperKernel<Format6K>>(args, team);
    default: return;  // the binding refuses other types
  }
}

}  // namespace etserve::cpu::ETSERVE_ISA
