// Sixteen int32 sums, and dot products of four unsigned weight bytes with four signed activation bytes into each, exact.
//
//   Ints  16 sums · Bytes  [lane 16][4] weights · Quad  four activations, the same for every lane
//   dot_bytes: any weight bytes; dot_nibbles: weights of 0 .. 15
#pragma once
#include "vec16.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

#if defined(ETSERVE_ISA_avx512)

using Ints = __m512i;
using Bytes = __m512i;
using Quad = __m512i;
constexpr int kQuantRows2 = 6, kQuantRows4 = 3;  // rows of a tile of 2 and of 4 panels

ETSERVE_INLINE Ints ints_set(int32_t v) { return _mm512_set1_epi32(v); }
ETSERVE_INLINE Vec to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
ETSERVE_INLINE Bytes load_weight_bytes(const char* p) { return _mm512_loadu_si512(p); }
ETSERVE_INLINE Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
ETSERVE_INLINE Bytes high_nibbles(Bytes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
ETSERVE_INLINE Quad broadcast_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return _mm512_set1_epi32(quad);
}
ETSERVE_INLINE Ints dot_bytes(Ints acc, Bytes w, Quad x) { return _mm512_dpbusd_epi32(acc, w, x); }
ETSERVE_INLINE Ints dot_nibbles(Ints acc, Bytes w, Quad x) { return _mm512_dpbusd_epi32(acc, w, x); }

#elif defined(ETSERVE_ISA_avx2)

struct Ints {
  __m256i low, high;
};
using Bytes = Ints;
struct Quad {
  __m256i bytes;
};
constexpr int kQuantRows2 = 2, kQuantRows4 = 1;

ETSERVE_INLINE Ints ints_set(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
ETSERVE_INLINE Vec to_floats(Ints v) { return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)}; }
ETSERVE_INLINE Bytes load_weight_bytes(const char* p) { return {load_256(p), load_256(p + 32)}; }
ETSERVE_INLINE __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
ETSERVE_INLINE Bytes low_nibbles(Bytes v) { return {low_nibbles(v.low), low_nibbles(v.high)}; }
ETSERVE_INLINE Bytes high_nibbles(Bytes v) {
  return {low_nibbles(_mm256_srli_epi16(v.low, 4)), low_nibbles(_mm256_srli_epi16(v.high, 4))};
}
ETSERVE_INLINE Quad broadcast_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return {_mm256_set1_epi32(quad)};
}
// maddubs would saturate at two products of 255 * 127: even and odd bytes apart, as 16-bit numbers.
ETSERVE_INLINE __m256i dot_bytes(__m256i acc, __m256i w, __m256i x) {
  const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w, 8);
  const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), x_odd = _mm256_srai_epi16(x, 8);
  return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(even, x_even), _mm256_madd_epi16(odd, x_odd)));
}
ETSERVE_INLINE Ints dot_bytes(Ints acc, Bytes w, Quad x) {
  return {dot_bytes(acc.low, w.low, x.bytes), dot_bytes(acc.high, w.high, x.bytes)};
}
ETSERVE_INLINE __m256i dot_nibbles(__m256i acc, __m256i w, __m256i x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
ETSERVE_INLINE Ints dot_nibbles(Ints acc, Bytes w, Quad x) {
  return {dot_nibbles(acc.low, w.low, x.bytes), dot_nibbles(acc.high, w.high, x.bytes)};
}

#else

using Ints = IntVec;
using Bytes = BitVec;  // four bytes to a lane, the first lowest
struct Quad {
  int32_t x[4];
};
constexpr int kQuantRows2 = 2, kQuantRows4 = 1;

ETSERVE_INLINE Ints ints_set(int32_t v) { return Ints{} + v; }
ETSERVE_INLINE Vec to_floats(Ints v) { return __builtin_convertvector(v, Vec); }
ETSERVE_INLINE Bytes load_weight_bytes(const char* p) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(p);
  uint32_t lanes[16];
  for (int i = 0; i < 16; ++i, bytes += 4)
    lanes[i] = bytes[0] | static_cast<uint32_t>(bytes[1]) << 8 | static_cast<uint32_t>(bytes[2]) << 16 |
               static_cast<uint32_t>(bytes[3]) << 24;
  Bytes w;
  std::memcpy(&w, lanes, sizeof w);
  return w;
}
ETSERVE_INLINE Bytes low_nibbles(Bytes v) { return v & 0x0f0f0f0fu; }
ETSERVE_INLINE Bytes high_nibbles(Bytes v) { return (v >> 4) & 0x0f0f0f0fu; }
ETSERVE_INLINE Quad broadcast_quad(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
ETSERVE_INLINE Ints dot_bytes(Ints acc, Bytes w, Quad x) {
  for (int i = 0; i < 4; ++i) acc += (Ints)((w >> (8 * i)) & 255u) * x.x[i];
  return acc;
}
ETSERVE_INLINE Ints dot_nibbles(Ints acc, Bytes w, Quad x) { return dot_bytes(acc, w, x); }

#endif

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
