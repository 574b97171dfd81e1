// Sixteen int32 sums, and dot products of four unsigned weight bytes with four signed activation bytes into each, exact.
//
//   Ints  16 sums · Bytes  [lane 16][4] weights · Quad  four activations, the same for every lane
//   dot_bytes: any weight bytes; dot_nibbles: weights of 0 .. 63
//   move_bits<FROM, TO>(v, mask): bit FROM of each byte to TO, and its neighbours with it; only those under the mask stay
//   load_u8, load_i8: 16 bytes as floats
#pragma once
#include <bit>

#include "vec16.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

#if defined(ETSERVE_ISA_avx512)

using Ints = __m512i;
using Bytes = __m512i;
using Quad = __m512i;
constexpr int kQuantStreamRows = 4;  // see walk.h
constexpr int kQuantRows2 = 6, kQuantRows4 = 3;  // rows of a tile of 2 and of 4 panels

ETSERVE_INLINE Ints ints_set(int32_t v) { return _mm512_set1_epi32(v); }
ETSERVE_INLINE Vec to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
ETSERVE_INLINE Bytes load_weight_bytes(const char* p) { return _mm512_loadu_si512(p); }
ETSERVE_INLINE Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
ETSERVE_INLINE Bytes high_nibbles(Bytes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
template <int FROM, int TO>
ETSERVE_INLINE Bytes move_bits(Bytes v, int mask) {
  const Bytes moved = FROM > TO ? _mm512_srli_epi16(v, FROM > TO ? FROM - TO : 0) : _mm512_slli_epi16(v, FROM > TO ? 0 : TO - FROM);
  return _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(mask)));
}
ETSERVE_INLINE Bytes join(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
ETSERVE_INLINE __m128i load_128(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
ETSERVE_INLINE Vec load_u8(const char* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_128(p))); }
ETSERVE_INLINE Vec load_i8(const char* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(p))); }
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
constexpr int kQuantStreamRows = 2;
constexpr int kQuantRows2 = 2, kQuantRows4 = 1;

ETSERVE_INLINE Ints ints_set(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
ETSERVE_INLINE Vec to_floats(Ints v) { return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)}; }
ETSERVE_INLINE Bytes load_weight_bytes(const char* p) { return {load_256(p), load_256(p + 32)}; }
ETSERVE_INLINE __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
ETSERVE_INLINE Bytes low_nibbles(Bytes v) { return {low_nibbles(v.low), low_nibbles(v.high)}; }
ETSERVE_INLINE Bytes high_nibbles(Bytes v) {
  return {low_nibbles(_mm256_srli_epi16(v.low, 4)), low_nibbles(_mm256_srli_epi16(v.high, 4))};
}
template <int FROM, int TO>
ETSERVE_INLINE __m256i move_bits(__m256i v, int mask) {
  const __m256i moved = FROM > TO ? _mm256_srli_epi16(v, FROM > TO ? FROM - TO : 0) : _mm256_slli_epi16(v, FROM > TO ? 0 : TO - FROM);
  return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)));
}
template <int FROM, int TO>
ETSERVE_INLINE Bytes move_bits(Bytes v, int mask) {
  return {move_bits<FROM, TO>(v.low, mask), move_bits<FROM, TO>(v.high, mask)};
}
ETSERVE_INLINE Bytes join(Bytes a, Bytes b) {
  return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
ETSERVE_INLINE __m128i load_64(const char* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
ETSERVE_INLINE Vec load_u8(const char* p) {
  return to_floats({_mm256_cvtepu8_epi32(load_64(p)), _mm256_cvtepu8_epi32(load_64(p + 8))});
}
ETSERVE_INLINE Vec load_i8(const char* p) {
  return to_floats({_mm256_cvtepi8_epi32(load_64(p)), _mm256_cvtepi8_epi32(load_64(p + 8))});
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
constexpr int kQuantStreamRows = 2;
constexpr int kQuantRows2 = 2, kQuantRows4 = 1;

ETSERVE_INLINE Ints ints_set(int32_t v) { return Ints{} + v; }
ETSERVE_INLINE Vec to_floats(Ints v) { return __builtin_convertvector(v, Vec); }
ETSERVE_INLINE Bytes load_weight_bytes(const char* p) {
  Bytes w;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(&w, p, sizeof w);
    return w;
  }
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(p);
  uint32_t lanes[16];
  for (int i = 0; i < 16; ++i, bytes += 4)
    lanes[i] = bytes[0] | static_cast<uint32_t>(bytes[1]) << 8 | static_cast<uint32_t>(bytes[2]) << 16 |
               static_cast<uint32_t>(bytes[3]) << 24;
  std::memcpy(&w, lanes, sizeof w);
  return w;
}
ETSERVE_INLINE Bytes low_nibbles(Bytes v) { return v & 0x0f0f0f0fu; }
ETSERVE_INLINE Bytes high_nibbles(Bytes v) { return (v >> 4) & 0x0f0f0f0fu; }
template <int FROM, int TO>
ETSERVE_INLINE Bytes move_bits(Bytes v, int mask) {
  const Bytes moved = FROM > TO ? v >> (FROM > TO ? FROM - TO : 0) : v << (FROM > TO ? 0 : TO - FROM);
  return moved & static_cast<uint32_t>(mask) * 0x01010101u;
}
ETSERVE_INLINE Bytes join(Bytes a, Bytes b) { return a | b; }
ETSERVE_INLINE Vec load_u8(const char* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(static_cast<uint8_t>(p[i]));
  return vec_load(lanes);
}
ETSERVE_INLINE Vec load_i8(const char* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(static_cast<int8_t>(p[i]));
  return vec_load(lanes);
}
ETSERVE_INLINE Quad broadcast_quad(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
// Not inlined: it is long on a machine without its own instruction, and every tile would have it dozens of times.
[[maybe_unused]] static __attribute__((noinline)) Ints dot_bytes(const Ints& acc_in, const Bytes& w, const Quad& x) {
  Ints acc = acc_in;
  for (int i = 0; i < 4; ++i) acc += (Ints)((w >> (8 * i)) & 255u) * x.x[i];
  return acc;
}
ETSERVE_INLINE Ints dot_nibbles(Ints acc, Bytes w, Quad x) { return dot_bytes(acc, w, x); }

#endif

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
