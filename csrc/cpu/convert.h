// Scalar conversions of 16-bit floats. Static, because kernels compiled per instruction set include this.
#pragma once
#include <cstdint>
#include <cstring>

namespace etserve::cpu {
namespace {

[[maybe_unused]] inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

[[maybe_unused]] inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

[[maybe_unused]] inline float from_bf16(uint16_t value) { return bits_to_float(static_cast<uint32_t>(value) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
[[maybe_unused]] inline uint16_t to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[maybe_unused]] inline float from_f16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t magnitude = value & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Shift into an f32 whose exponent is too small by 112, and let one multiplication put it right, subnormals too.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * bits_to_float(0x77800000u)));
}

// Round to nearest, ties to even; beyond 65504 infinite; NaN stays NaN.
[[maybe_unused]] inline uint16_t to_f16(float value) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u)  // subnormal: adding 0.5 leaves whole multiples of 2^-24 in the lowest bits
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u));
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

// As to_f16, but what is finite stays finite: at most 65504. Behind a mask infinity is not harmless: 0 * inf is NaN.
[[maybe_unused]] inline uint16_t to_finite_f16(float value) {
  const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffffu;
  const bool is_beyond = magnitude >= 0x477ff000u && magnitude < 0x7f800000u;
  if (is_beyond) return static_cast<uint16_t>((bits >> 16 & 0x8000u) | 0x7bffu);
  return to_f16(value);
}

}  // namespace
}  // namespace etserve::cpu
