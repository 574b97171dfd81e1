#include "convert.h"
#include "matrix.h"
#include "quant.h"

namespace etserve::cpu {
namespace {

// Element index of (row, column) in a packed matrix.
int64_t packed_index(const PackedMatrix& m, int64_t row, int64_t column, int half) {
  const int64_t panel = row / kPanel * (m.paired ? 2 : 1) + half, lane = row % kPanel;
  const int64_t base = panel * kPanel * m.padded_k();
  if (m.type == DType::bf16) return base + column / 2 * (2 * kPanel) + lane * 2 + column % 2;
  return base + column * kPanel + lane;
}

template <class T>
void copy_rows(const PackedMatrix& m, T* data, const T* from, int64_t rows, int64_t first, int half) {
  const bool is_bf16 = m.type == DType::bf16;
  const int64_t step = is_bf16 ? 2 * kPanel : kPanel;
  for (int64_t r = 0; r < rows; ++r) {
    T* out = data + packed_index(m, first + r, 0, half);
    const T* row = from + r * m.k;
    if (is_bf16) {
      for (int64_t c = 0; c < m.k; ++c) out[c / 2 * step + c % 2] = row[c];
    } else {
      for (int64_t c = 0; c < m.k; ++c) out[c * step] = row[c];
    }
  }
}

}  // namespace

void pack_rows(const PackedMatrix& m, void* data, const void* rows_data, int64_t rows, int64_t first, int half) {
  if (is_quantised(m.type))
    pack_quantised_rows(m, data, rows_data, rows, first, half);
  else if (m.element_size() == 4)
    copy_rows(m, static_cast<uint32_t*>(data), static_cast<const uint32_t*>(rows_data), rows, first, half);
  else
    copy_rows(m, static_cast<uint16_t*>(data), static_cast<const uint16_t*>(rows_data), rows, first, half);
}

void unpack_row(const PackedMatrix& m, int64_t row, float* out) {
  if (is_quantised(m.type)) return unpack_quantised_row(m, row, out);
  for (int64_t c = 0; c < m.k; ++c) {
    const int64_t at = packed_index(m, row, c, 0);
    if (m.type == DType::f32)
      out[c] = static_cast<const float*>(m.data)[at];
    else if (m.type == DType::bf16)
      out[c] = from_bf16(static_cast<const uint16_t*>(m.data)[at]);
    else
      out[c] = from_f16(static_cast<const uint16_t*>(m.data)[at]);
  }
}

}  // namespace etserve::cpu
