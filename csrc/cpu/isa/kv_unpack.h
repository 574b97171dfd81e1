// Entries of f16 and i8 caches as floats, for each instruction set: 16 words of 2 halves or of 4 signed bytes, of which
// to[i] gets the i-th.
#pragma once
#include "simd.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

#if defined(ETSERVE_ISA_avx512)

inline void unpack_f16(const uint32_t* p, F* to) {
  const __m512i words = _mm512_loadu_si512(p);
  to[0] = {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))};
  to[1] = {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)))};
}
inline void unpack_i8(const uint32_t* p, F* to) {
  const __m512i words = _mm512_loadu_si512(p);
  to[0] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24))};
  to[1] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 24))};
  to[2] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 8), 24))};
  to[3] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(words, 24))};
}

#elif defined(ETSERVE_ISA_avx2)

inline __m256 halves_to_floats(__m256i words) {  // each word below 2^16
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
inline void unpack_f16(const uint32_t* p, F* to) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8));
  const __m256i lower = _mm256_set1_epi32(0xffff);
  to[0] = {halves_to_floats(_mm256_and_si256(x, lower)), halves_to_floats(_mm256_and_si256(y, lower))};
  to[1] = {halves_to_floats(_mm256_srli_epi32(x, 16)), halves_to_floats(_mm256_srli_epi32(y, 16))};
}
template <int Left>
inline __m256 bytes_to_floats(__m256i words) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, Left), 24));
}
inline void unpack_i8(const uint32_t* p, F* to) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8));
  to[0] = {bytes_to_floats<24>(x), bytes_to_floats<24>(y)};
  to[1] = {bytes_to_floats<16>(x), bytes_to_floats<16>(y)};
  to[2] = {bytes_to_floats<8>(x), bytes_to_floats<8>(y)};
  to[3] = {bytes_to_floats<0>(x), bytes_to_floats<0>(y)};
}

#else

inline void unpack_f16(const uint32_t* p, F* to) {
  for (int i = 0; i < 16; ++i) {
    to[0].v[i] = from_f16(static_cast<uint16_t>(p[i] & 0xffffu));
    to[1].v[i] = from_f16(static_cast<uint16_t>(p[i] >> 16));
  }
}
inline void unpack_i8(const uint32_t* p, F* to) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 4; ++k) to[k].v[i] = static_cast<float>(static_cast<int8_t>(p[i] >> (8 * k) & 0xffu));
}

#endif

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
