#include <cstring>

#include "convert.h"
#include "quant.h"

namespace etserve::cpu {
namespace {

// Where one output's part of a record lies, relative to the record.
struct Layout {
  explicit Layout(DType type)
      : is_wide(type == DType::q8_0), has_min(type == DType::q4_1), header(has_min ? 128 : 64),
        block_bytes(is_wide ? 512 : 256) {}

  static int64_t scale(int64_t block, int64_t lane) { return block % 2 * 32 + lane * 2; }
  // Byte of weight i of a block: a group of four lies together, a low nibble's group beside its high nibble's.
  int64_t byte(int64_t block, int64_t lane, int64_t i) const {
    const int64_t group = i / 4 / (is_wide ? 1 : 2);
    return header + block % 2 * block_bytes + group * 64 + lane * 4 + i % 4;
  }

  bool is_wide, has_min;
  int64_t header, block_bytes;
};

int64_t record_at(const PackedMatrix& m, int64_t row, int64_t block, int half) {
  const int64_t panel = row / kPanel * (m.paired ? 2 : 1) + half;
  return panel * m.panel_bytes() + block / 2 * quant_size(m.type).record_bytes;
}

void pack_wide(const Layout& layout, char* record, int64_t block, int64_t lane, const uint8_t* q) {
  for (int i = 0; i < kQuantBlock; ++i)
    record[layout.byte(block, lane, i)] = static_cast<char>(q[i] ^ 0x80);  // from signed to offset by 128
}

// ggml keeps weight j in the low nibble of byte j and weight j + 16 in its high one.
uint8_t nibble(const uint8_t* q, int64_t i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }

void pack_nibbles(const Layout& layout, char* record, int64_t block, int64_t lane, const uint8_t* q) {
  for (int i = 0; i < kQuantBlock; ++i) {
    if (i / 4 % 2) continue;
    record[layout.byte(block, lane, i)] = static_cast<char>(nibble(q, i) | nibble(q, i + 4) << 4);
  }
}

}  // namespace

void pack_quantised_rows(const PackedMatrix& m, void* data, const void* blocks, int64_t rows, int64_t first, int half) {
  if (m.type >= DType::q4_k) return pack_super_rows(m, data, blocks, rows, first, half);
  const Layout layout(m.type);
  const uint8_t* from = static_cast<const uint8_t*>(blocks);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t b = 0; b < m.k / kQuantBlock; ++b, from += quant_size(m.type).block_bytes) {
      const int64_t row = first + r, lane = row % kPanel;
      char* record = static_cast<char*>(data) + record_at(m, row, b, half);
      std::memcpy(record + Layout::scale(b, lane), from, 2);
      if (layout.has_min) std::memcpy(record + 64 + Layout::scale(b, lane), from + 2, 2);
      (layout.is_wide ? pack_wide : pack_nibbles)(layout, record, b, lane, from + (layout.has_min ? 4 : 2));
    }
}

void unpack_quantised_row(const PackedMatrix& m, int64_t row, float* out) {
  if (m.type >= DType::q4_k) return unpack_super_row(m, row, out);
  const Layout layout(m.type);
  const int64_t lane = row % kPanel;
  const int offset = layout.is_wide ? 128 : m.type == DType::q4_0 ? 8 : 0;
  for (int64_t k = 0; k < m.k; ++k) {
    const int64_t b = k / kQuantBlock, i = k % kQuantBlock;
    const char* record = static_cast<const char*>(m.data) + record_at(m, row, b, 0);
    uint16_t scale, minimum = 0;
    std::memcpy(&scale, record + Layout::scale(b, lane), 2);
    if (layout.has_min) std::memcpy(&minimum, record + 64 + Layout::scale(b, lane), 2);
    int q = static_cast<uint8_t>(record[layout.byte(b, lane, i)]);
    if (!layout.is_wide) q = i / 4 % 2 ? q >> 4 : q & 15;
    out[k] = from_f16(scale) * static_cast<float>(q - offset) + from_f16(minimum);
  }
}

}  // namespace etserve::cpu
