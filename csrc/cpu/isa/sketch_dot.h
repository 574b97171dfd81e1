// What a scan of sketches needs beside simd.h, for each instruction set:
//   I: 16 whole numbers of 32 bits;  to_float(I);  load_bf16(p): 16 of them as F
//   code_dots<bits, R>: products of codes with R queries, exact and so the same everywhere
//   sum_each(rows): lane i is the sum over the lanes of rows[i], 16 rows, in a fixed tree
#pragma once
#include "simd.h"
#include "sketch_plan.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

// Bytes level + offset of codes 0 .. 3 (1 bit: of 0 and 1, twice), lowest first.
constexpr int32_t level_bytes(int bits) {
  const int low = kLevelOffset - kOuterLevel, high = kLevelOffset + kOuterLevel;
  return bits == 2 ? low | (kLevelOffset - kInnerLevel) << 8 | (kLevelOffset + kInnerLevel) << 16 | high << 24
                   : low | high << 8 | low << 16 | high << 24;
}

#if defined(ETSERVE_ISA_avx512)

struct I {
  __m512i v;
};
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

// out[r][t] = start[r] + sum over dimensions of (level + 64) of token t * queries[r]; 4 dimensions are one int32.
template <int Bits, int R>
inline __attribute__((always_inline)) void code_dots(const uint8_t* codes, int lines, const int32_t* const* queries,
                                                     const int32_t* start, I* out) {
  constexpr int kFields = 8 / Bits;
  const __m512i table = _mm512_set1_epi32(level_bytes(Bits)), mask = _mm512_set1_epi8(0x0f);
  __m512i even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = _mm512_set1_epi32(start[r]), odd[r] = _mm512_setzero_si512();
  for (int l = 0; l < lines; ++l) {
    const __m512i line = _mm512_loadu_si512(codes + 64 * l);
    for (int k = 0; k < kFields; ++k) {  // the look-up repeats itself every 4 entries: bits of other fields do no harm
      const __m512i field = _mm512_and_si512(_mm512_srli_epi16(line, static_cast<unsigned>(Bits * k)), mask);
      const __m512i levels = _mm512_shuffle_epi8(table, field);
      for (int r = 0; r < R; ++r) {
        __m512i& sum = k % 2 ? odd[r] : even[r];
        sum = _mm512_dpbusd_epi32(sum, levels, _mm512_set1_epi32(queries[r][l * kFields + k]));
      }
    }
  }
  for (int r = 0; r < R; ++r) out[r].v = _mm512_add_epi32(even[r], odd[r]);
}

inline F sum_each(const F* rows) {
  __m512 pairs[8], fours[4], eights[2];
  for (int i = 0; i < 8; ++i)
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v),
                             _mm512_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; ++i)
    eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                        _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd))};
}

#else

struct I {
  int32_t v[16];
};
inline F to_float(const I& a) {
  float lanes[16];
  for (int t = 0; t < 16; ++t) lanes[t] = static_cast<float>(a.v[t]);
  return load(lanes);
}
inline F load_bf16(const uint16_t* p) {
  float lanes[16];
  for (int t = 0; t < 16; ++t) lanes[t] = from_bf16(p[t]);
  return load(lanes);
}
inline F sum_each(const F* rows) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = reduce_add(rows[i]);
  return load(lanes);
}

#if defined(ETSERVE_ISA_avx2)

template <int Bits, int R>
inline void code_dots(const uint8_t* codes, int lines, const int32_t* const* queries, const int32_t* start, I* out) {
  constexpr int kFields = 8 / Bits;
  const __m256i table = _mm256_set1_epi32(level_bytes(Bits)), mask = _mm256_set1_epi8(0x0f);
  const __m256i ones = _mm256_set1_epi16(1);
  for (int half = 0; half < 2; ++half) {
    __m256i sums[R];
    for (int r = 0; r < R; ++r) sums[r] = _mm256_set1_epi32(start[r]);
    for (int l = 0; l < lines; ++l) {
      const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * l + 32 * half));
      for (int k = 0; k < kFields; ++k) {
        const __m256i levels = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(line, Bits * k), mask));
        for (int r = 0; r < R; ++r) {
          const __m256i query = _mm256_set1_epi32(queries[r][l * kFields + k]);
          sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(_mm256_maddubs_epi16(levels, query), ones));
        }
      }
    }
    for (int r = 0; r < R; ++r) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[r].v + 8 * half), sums[r]);
  }
}

#else

template <int Bits, int R>
inline void code_dots(const uint8_t* codes, int lines, const int32_t* const* queries, const int32_t* start, I* out) {
  constexpr int kFields = 8 / Bits;
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < 16; ++t) out[r].v[t] = start[r];
  for (int group = 0; group < lines * kFields; ++group) {
    const uint8_t* line = codes + group / kFields * 64;
    int32_t levels[64];
    for (int i = 0; i < 64; ++i)
      levels[i] = level_bytes(Bits) >> (line[i] >> group % kFields * Bits & ((1 << Bits) - 1)) * 8 & 0xff;
    for (int r = 0; r < R; ++r) {
      int8_t query[4];
      std::memcpy(query, queries[r] + group, 4);
      for (int i = 0; i < 64; ++i) out[r].v[i / 4] += levels[i] * query[i % 4];
    }
  }
}

#endif
#endif

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
