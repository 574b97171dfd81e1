// What the matrix kernels share: a tile of outputs, and how its sums leave the registers.
#pragma once
#include "matrix.h"
#include "vec16.h"

namespace etserve::cpu::ETSERVE_ISA {

void matmul_quantised(const MatmulArgs&, Team&);  // gemm_quant.cpp

namespace {

struct Tile {
  const MatmulArgs* args;
  const char* w;         // the first panel of the tile
  int64_t panel_bytes;
  int64_t row, panel;    // of the tile's corner
};

ETSERVE_INLINE Vec add_bias(Vec y, const float* bias, int64_t column, int64_t count) {
  if (!bias) return y;
  return vec_add(y, count == kPanel ? vec_load(bias + column) : vec_load_part(bias + column, count));
}

[[maybe_unused]] void write_f32(const MatmulArgs& a, int64_t row, int64_t panel, const float* sums) {
  const int64_t column = panel * kPanel;
  const int64_t count = a.w.n - column < kPanel ? a.w.n - column : kPanel;
  float* out = static_cast<float*>(a.out) + row * a.out_stride + column;
  const Vec y = add_bias(vec_load(sums), a.w.bias, column, count);
  const bool adds = a.epilogue == Epilogue::add;
  if (count == kPanel) {
    vec_store(out, adds ? vec_add(vec_load(out), y) : y);
  } else {
    vec_store_part(out, adds ? vec_add(vec_load_part(out, count), y) : y, count);
  }
}

[[maybe_unused]] void write_silu_mul(const MatmulArgs& a, int64_t row, int64_t panel, const float* sums) {
  const int64_t column = panel / 2 * kPanel;
  const int64_t count = a.w.n - column < kPanel ? a.w.n - column : kPanel;
  const Vec gate = add_bias(vec_load(sums), a.w.bias, column, count);
  const Vec up = add_bias(vec_load(sums + kPanel), a.w.bias ? a.w.bias + a.w.n : nullptr, column, count);
  const Vec y = vec_mul(vec_silu(gate), up);
  const int64_t at = row * a.out_stride + column;
  if (a.w.activation() == DType::bf16) {
    uint16_t* out = static_cast<uint16_t*>(a.out) + at;
    count == kPanel ? store_bf16(out, y) : store_bf16_part(out, y, count);
  } else {
    float* out = static_cast<float*>(a.out) + at;
    count == kPanel ? vec_store(out, y) : vec_store_part(out, y, count);
  }
}

[[maybe_unused]] void write_tile(const Tile& t, int rows, int panels, const float* sums) {
  const bool is_paired = t.args->epilogue == Epilogue::silu_mul;
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < panels; j += is_paired ? 2 : 1) {
      const float* from = sums + (i * panels + j) * kPanel;
      const auto write = is_paired ? write_silu_mul : write_f32;
      write(*t.args, t.row + i, t.panel + j, from);
    }
}

// A pointer that the compiler takes as it is: three rows hang on each, so a dozen rows need four registers, not 12.
template <class T>
ETSERVE_INLINE void keep_in_register(T*& pointer) {
#if defined(__GNUC__)
  asm("" : "+r"(pointer));
#endif
}

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
