// What the products over quantised weights share: rows of 8-bit activations, and dot products of four with them.
#pragma once
#include "dot4.h"
#include "quantise.h"
#include "walk.h"

namespace etserve::cpu::ETSERVE_ISA {

void matmul_super(const MatmulArgs&, Team&);  // gemm_super.cpp

namespace {

constexpr int kGroups = kQuantBlock / 4;  // dot products of four in a block

struct QuantTile : Tile {
  const QuantRows* x;
};

template <int ROWS>
struct RowPointers {
  static constexpr int kBases = (ROWS + 2) / 3;
  const int8_t* bytes[kBases];  // three rows hang on each, see keep_in_register
  int64_t stride;

  explicit RowPointers(const QuantTile& t) : stride(t.x->byte_stride) {
#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) bytes[i] = t.x->bytes + (t.row + 3 * i) * stride;
  }
  const int8_t* at(int row) const { return bytes[row / 3] + row % 3 * stride; }
  void advance() {  // by a block
#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) {
      bytes[i] += kQuantBlock;
      keep_in_register(bytes[i]);
    }
  }
};

// IS_WIDE: weights of 8 bits; else of up to 6.
template <bool IS_WIDE, int ROWS, int PANELS>
ETSERVE_INLINE void dot_group(Ints (&sums)[ROWS][PANELS], const Bytes (&w)[PANELS], const RowPointers<ROWS>& x,
                              int64_t offset) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
    const Quad quad = broadcast_quad(x.at(i) + offset);
#pragma GCC unroll 4
    for (int j = 0; j < PANELS; ++j)
      sums[i][j] = IS_WIDE ? dot_bytes(sums[i][j], w[j], quad) : dot_nibbles(sums[i][j], w[j], quad);
  }
}

template <class K>
void walk_quantised(const MatmulArgs& a, Team& team) {
  const QuantRows rows = quantise_rows(a, team);
  walk_matrix<K>({{&a, static_cast<const char*>(a.w.data), a.w.panel_bytes(), 0, 0}, &rows}, team);
}

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
