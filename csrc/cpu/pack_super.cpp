// Super-blocks of 256 weights, from ggml's order to the kernels' (both in quant.h).
#include <cstring>

#include "convert.h"
#include "quant.h"

namespace etserve::cpu {
namespace {

// One super-block of one output, spread out.
struct SuperBlock {
  uint16_t scale, minimum;  // f16: d and -e
  uint8_t small[16];        // s, then m; q6_k: s of each 16
  uint8_t quants[kSuperBlock];
};

// ggml's twelve bytes of eight 6-bit scales and eight 6-bit minima.
void read_small(const uint8_t* packed, uint8_t* small) {
  for (int i = 0; i < 4; ++i) {
    small[i] = packed[i] & 63;
    small[8 + i] = packed[4 + i] & 63;
    small[4 + i] = static_cast<uint8_t>((packed[8 + i] & 15) | (packed[i] >> 6) << 4);
    small[12 + i] = static_cast<uint8_t>(packed[8 + i] >> 4 | (packed[4 + i] >> 6) << 4);
  }
}

// q4_k: d, e, small, nibbles[128]; q5_k: d, e, small, bits[32], nibbles[128].
void read_with_minima(const uint8_t* block, bool has_high_bit, SuperBlock* out) {
  std::memcpy(&out->scale, block, 2);
  std::memcpy(&out->minimum, block + 2, 2);
  out->minimum ^= 0x8000;
  read_small(block + 4, out->small);
  const uint8_t* bits = block + 16;
  const uint8_t* nibbles = block + (has_high_bit ? 48 : 16);
  for (int i = 0; i < kSuperBlock; ++i) {
    const int part = i / 32, byte = nibbles[part / 2 * 32 + i % 32];
    const int high = has_high_bit ? bits[i % 32] >> part & 1 : 0;
    out->quants[i] = static_cast<uint8_t>((part % 2 ? byte >> 4 : byte & 15) | high << 4);
  }
}

// q6_k: nibbles[128], bits[64], s[16], d.
void read_six_bits(const uint8_t* block, SuperBlock* out) {
  std::memcpy(out->small, block + 192, 16);
  std::memcpy(&out->scale, block + 208, 2);
  out->minimum = 0;
  for (int i = 0; i < kSuperBlock; ++i) {
    const int half = i / 128, quarter = i % 128 / 32;
    const int byte = block[half * 64 + quarter % 2 * 32 + i % 32];
    const int high = block[128 + half * 32 + i % 32] >> (2 * quarter) & 3;
    out->quants[i] = static_cast<uint8_t>((quarter / 2 ? byte >> 4 : byte & 15) | high << 4);
  }
}

void read_block(DType type, const uint8_t* block, SuperBlock* out) {
  type == DType::q6_k ? read_six_bits(block, out) : read_with_minima(block, type == DType::q5_k, out);
}

// Where weight i of a lane lies in a record: the byte with its low four bits, and the byte with the others.
struct Place {
  Place(DType type, int64_t i, int64_t lane) {
    const int64_t block = i / kQuantBlock, group = i % kQuantBlock / 4;
    const int64_t start = kSuperQuants + block * super_block_bytes(type) + lane * 4 + i % 4;
    low = start + group / 2 * 64;
    low_shift = group % 2 * 4;
    high = start + 256 + (type == DType::q6_k ? group / 4 * 64 : 0);
    high_shift = type == DType::q6_k ? group % 4 * 2 : group;
    high_mask = type == DType::q4_k ? 0 : type == DType::q5_k ? 1 : 3;
  }
  int64_t low, high;
  int64_t low_shift, high_shift;
  int high_mask;
};

void write_lane(DType type, char* record, int64_t lane, const SuperBlock& from) {
  std::memcpy(record + lane * 2, &from.scale, 2);
  std::memcpy(record + 32 + lane * 2, &from.minimum, 2);
  for (int i = 0; i < 16; ++i) record[kSuperScales + i * kPanel + lane] = static_cast<char>(from.small[i]);
  for (int64_t i = 0; i < kSuperBlock; ++i) {
    const Place place(type, i, lane);
    record[place.low] = static_cast<char>(record[place.low] | (from.quants[i] & 15) << place.low_shift);
    if (place.high_mask)
      record[place.high] = static_cast<char>(record[place.high] | (from.quants[i] >> 4) << place.high_shift);
  }
}

float read_weight(DType type, const char* record, int64_t lane, int64_t i) {
  const Place place(type, i, lane);
  int q = static_cast<uint8_t>(record[place.low]) >> place.low_shift & 15;
  if (place.high_mask) q |= (static_cast<uint8_t>(record[place.high]) >> place.high_shift & place.high_mask) << 4;
  uint16_t scale, minimum;
  std::memcpy(&scale, record + lane * 2, 2);
  std::memcpy(&minimum, record + 32 + lane * 2, 2);
  const char* small = record + kSuperScales + lane;
  if (type == DType::q6_k)
    return from_f16(scale) * static_cast<float>(static_cast<int8_t>(small[i / 16 * kPanel])) * static_cast<float>(q - 32);
  const int64_t part = i / kQuantBlock;
  const float low = from_f16(minimum) * static_cast<float>(static_cast<uint8_t>(small[128 + part * kPanel]));
  return from_f16(scale) * static_cast<float>(static_cast<uint8_t>(small[part * kPanel])) * static_cast<float>(q) + low;
}

int64_t record_at(const PackedMatrix& m, int64_t row, int64_t block, int half) {
  const int64_t panel = row / kPanel * (m.paired ? 2 : 1) + half;
  return panel * m.panel_bytes() + block * quant_size(m.type).record_bytes;
}

}  // namespace

void pack_super_rows(const PackedMatrix& m, void* data, const void* blocks, int64_t rows, int64_t first, int half) {
  const uint8_t* from = static_cast<const uint8_t*>(blocks);
  SuperBlock block;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t b = 0; b < m.k / kSuperBlock; ++b, from += quant_size(m.type).block_bytes) {
      read_block(m.type, from, &block);
      write_lane(m.type, static_cast<char*>(data) + record_at(m, first + r, b, half), (first + r) % kPanel, block);
    }
}

void unpack_super_row(const PackedMatrix& m, int64_t row, float* out) {
  for (int64_t k = 0; k < m.k; ++k) {
    const char* record = static_cast<const char*>(m.data) + record_at(m, row, k / kSuperBlock, 0);
    out[k] = read_weight(m.type, record, row % kPanel, k % kSuperBlock);
  }
}

}  // namespace etserve::cpu
