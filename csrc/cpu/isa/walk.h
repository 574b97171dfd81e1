// How a product walks its matrix: which panels and rows make a tile, and in which order tiles come.
//
// A kernel K brings
//   K::Corner                              a Tile, and what else the kernel wants to know
//   K::kRows2, K::kRows4                   most rows of a tile of two and of four panels
//   K::kStream                             so many rows, or fewer, take one panel after the other
//   K::sum<ROWS, PANELS>(tile, sums, pitch)  the products of a tile: row i, panel j to sums[(i * pitch + j) * kPanel]
//
// Few rows are bound by memory. With a panel at a time each thread reads one stream from end to end, which the hardware
// fetches ahead by itself. What it gains over four panels side by side, fetched ahead by instructions: decision 0005.
//
// Every output is summed in the same order whatever the tile, so that the choice here is only one of speed.
#pragma once
#include "epilogue.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

// While a group of panels is multiplied, the next group is fetched into the caches, line by line in the same rhythm; if a
// group is so large that it would push itself out, only so far ahead.
constexpr int64_t kMaxGroupBytes = 256 << 10, kNearBytes = 4096;

template <int PANELS>
ETSERVE_INLINE int64_t fetch_distance(int64_t panel_bytes) {
  return PANELS * panel_bytes <= kMaxGroupBytes ? PANELS * panel_bytes : kNearBytes;
}

// A panel on its own is read in order, and needs no help.
template <int PANELS>
ETSERVE_INLINE void fetch_ahead(const char* line) {
  if constexpr (PANELS > 1) prefetch(line);
}

template <int ROWS, int PANELS>
ETSERVE_INLINE void clear(Vec (&acc)[ROWS][PANELS]) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < PANELS; ++j) acc[i][j] = vec_set(0.0f);
}

// As K::sum leaves them.
template <int ROWS, int PANELS>
ETSERVE_INLINE void store_sums(const Vec (&acc)[ROWS][PANELS], float* sums, int pitch) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < PANELS; ++j) vec_store(sums + (i * pitch + j) * kPanel, acc[i][j]);
}

template <class K, int PANELS, int ROWS>
void compute_rows(const typename K::Corner& t, int rows) {
  if constexpr (ROWS > 0) {
    if (rows < ROWS) return compute_rows<K, PANELS, ROWS - 1>(t, rows);
    alignas(64) float sums[ROWS * PANELS * kPanel];
    K::template sum<ROWS, PANELS>(t, sums, PANELS);
    write_tile(t, ROWS, PANELS, sums);
  }
}

// All rows against PANELS panels: they stay in the cache while the rows stream by, in tiles of nearly equal height.
template <class K, int PANELS, int MAX_ROWS>
void compute_panels(typename K::Corner t) {
  const int64_t m = t.args->m, tiles = (m + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t end = m * (i + 1) / tiles;
    compute_rows<K, PANELS, MAX_ROWS>(t, static_cast<int>(end - t.row));
    t.row = end;
  }
}

// All of the few rows against `panels` (1, or the 2 of a pair) one after the other, and then their epilogue.
template <class K, int ROWS>
void compute_streams(const typename K::Corner& t, int panels) {
  if constexpr (ROWS > 0) {
    if (t.args->m < ROWS) return compute_streams<K, ROWS - 1>(t, panels);
    alignas(64) float sums[ROWS * 2 * kPanel];
    typename K::Corner part = t;
    for (int j = 0; j < panels; ++j, part.w += t.panel_bytes) K::template sum<ROWS, 1>(part, sums + j * kPanel, panels);
    write_tile(t, ROWS, panels, sums);
  }
}

// This member's share of the product. `corner`: the tile at row 0, panel 0.
template <class K>
void walk_matrix(const typename K::Corner& corner, Team& team) {
  const MatmulArgs& a = *corner.args;
  const int unit = a.w.paired ? 2 : 1;
  int64_t panel, end;
  team.split(a.w.num_panels(), unit, &panel, &end);
  const auto tile = [&] {
    typename K::Corner t = corner;
    t.w += panel * t.panel_bytes;
    t.panel = panel;
    return t;
  };
  if (a.m <= K::kStream) {
    for (; panel < end; panel += unit) compute_streams<K, K::kStream>(tile(), unit);
    return;
  }
  if (a.m <= K::kRows4)
    for (; panel + 4 <= end; panel += 4) compute_panels<K, 4, K::kRows4>(tile());
  for (; panel + 2 <= end; panel += 2) compute_panels<K, 2, K::kRows2>(tile());
  if (panel < end) compute_panels<K, 1, K::kRows2>(tile());
}

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
