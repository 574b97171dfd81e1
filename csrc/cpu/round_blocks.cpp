// Rounding of weights to ggml's blocks, to the bits of the gguf package (gguf/quants.py: Q8_0, Q4_0, Q4_1).
#include <cmath>
#include <cstring>

#include "convert.h"
#include "quant.h"

namespace etserve::cpu {
namespace {

float inverse(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

// 0 .. 15 for whatever x, NaN included.
uint8_t to_nibble(float x) {
  const float bounded = x > 15.0f ? 15.0f : x;
  return bounded > 0.0f ? static_cast<uint8_t>(bounded) : 0;
}

// To the nearest, halves away from zero; NaN gives 0.
int8_t to_byte(float x) {
  const float size = std::fabs(x) <= 127.0f ? std::fabs(x) : x == x ? 127.0f : 0.0f;
  const int whole = static_cast<int>(size);
  const int rounded = whole + (2.0f * (size - static_cast<float>(whole)) >= 1.0f ? 1 : 0);
  return static_cast<int8_t>(x < 0.0f ? -rounded : rounded);
}

void write_f16(uint8_t* out, float value) {
  const uint16_t bits = to_f16(value);
  std::memcpy(out, &bits, 2);
}

void round_q8_0(const float* x, uint8_t* out) {
  float largest = 0.0f;
  for (int i = 0; i < kQuantBlock; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
  const float scale = largest / 127.0f, factor = inverse(scale);
  write_f16(out, scale);
  for (int i = 0; i < kQuantBlock; ++i) out[2 + i] = static_cast<uint8_t>(to_byte(x[i] * factor));
}

void round_q4_0(const float* x, uint8_t* out) {
  float extreme = x[0];  // the first of the largest magnitude
  for (int i = 1; i < kQuantBlock; ++i) extreme = std::fabs(x[i]) > std::fabs(extreme) ? x[i] : extreme;
  const float scale = extreme / -8.0f, factor = inverse(scale);
  write_f16(out, scale);
  for (int i = 0; i < kQuantBlock / 2; ++i) {
    const int low = to_nibble(x[i] * factor + 8.5f), high = to_nibble(x[i + 16] * factor + 8.5f);
    out[2 + i] = static_cast<uint8_t>(low | high << 4);
  }
}

void round_q4_1(const float* x, uint8_t* out) {
  float lowest = x[0], highest = x[0];
  for (int i = 1; i < kQuantBlock; ++i) {
    lowest = x[i] < lowest ? x[i] : lowest;
    highest = x[i] > highest ? x[i] : highest;
  }
  const float scale = (highest - lowest) / 15.0f, factor = inverse(scale);
  write_f16(out, scale);
  write_f16(out + 2, lowest);
  for (int i = 0; i < kQuantBlock / 2; ++i) {
    const int low = to_nibble((x[i] - lowest) * factor + 0.5f), high = to_nibble((x[i + 16] - lowest) * factor + 0.5f);
    out[4 + i] = static_cast<uint8_t>(low | high << 4);
  }
}

}  // namespace

void round_to_blocks(DType type, const float* x, int64_t rows, int64_t k, void* blocks) {
  const auto round = type == DType::q8_0 ? round_q8_0 : type == DType::q4_0 ? round_q4_0 : round_q4_1;
  uint8_t* out = static_cast<uint8_t*>(blocks);
  for (const float* end = x + rows * k; x < end; x += kQuantBlock, out += quant_size(type).block_bytes) round(x, out);
}

}  // namespace etserve::cpu
