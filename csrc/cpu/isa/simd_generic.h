// Plain C++ for any machine: an array of 16 floats.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace etserve::cpu::ETSERVE_ISA {
namespace {

struct F {
  float v[16];
};
struct Mask {
  bool v[16];
};

constexpr float kExpLowest = -88.0f;

template <class Op>
inline F each(Op op) {
  F r;
  for (int i = 0; i < 16; ++i) r.v[i] = op(i);
  return r;
}
template <class Op>
inline Mask each_mask(Op op) {
  Mask r;
  for (int i = 0; i < 16; ++i) r.v[i] = op(i);
  return r;
}
inline F set1(float x) {
  return each([=](int) { return x; });
}
inline F zero() { return set1(0.0f); }
inline F load(const float* p) {
  F r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store(float* p, const F& a) { std::memcpy(p, a.v, sizeof a.v); }
inline F add(const F& a, const F& b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F sub(const F& a, const F& b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F mul(const F& a, const F& b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F fma(const F& a, const F& b, const F& c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F max(const F& a, const F& b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F min(const F& a, const F& b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Mask less(const F& a, const F& b) {
  return each_mask([&](int i) { return a.v[i] < b.v[i]; });
}
inline Mask at_least(const F& a, const F& b) {
  return each_mask([&](int i) { return a.v[i] >= b.v[i]; });
}
inline Mask lanes_below(int n) {
  return each_mask([=](int i) { return i < n; });
}
inline uint32_t bits(const Mask& m) {
  uint32_t r = 0;
  for (int i = 0; i < 16; ++i) r |= static_cast<uint32_t>(m.v[i]) << i;
  return r;
}
inline Mask from_bits(uint32_t m) {
  return each_mask([=](int i) { return (m >> i & 1u) != 0; });
}
inline F select(const Mask& m, const F& yes, const F& no) {
  return each([&](int i) { return m.v[i] ? yes.v[i] : no.v[i]; });
}
inline F load_below(const float* p, int n, float fill) {  // lanes >= n are not read
  return each([=](int i) { return i < n ? p[i] : fill; });
}
inline float reduce_add(const F& a) {
  float h[8];
  for (int i = 0; i < 8; ++i) h[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; ++i) h[i] += h[i + 4];
  return (h[0] + h[2]) + (h[1] + h[3]);
}
inline float reduce_max(const F& a) {
  float r = a.v[0];
  for (int i = 1; i < 16; ++i) r = a.v[i] > r ? a.v[i] : r;
  return r;
}
inline F round_nearest(const F& a) {  // |a| < 2^22: adding 1.5 * 2^23 leaves no fraction bits
  return each([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}
inline F scale_by_power(const F& p, const F& n, const F& x) {
  return each([&](int i) {
    const float power = n.v[i] > -126.0f ? n.v[i] : -126.0f;
    const uint32_t u = static_cast<uint32_t>(static_cast<int32_t>(power) + 127) << 23;
    float scale;
    std::memcpy(&scale, &u, 4);
    return x.v[i] < -87.3f ? 0.0f : p.v[i] * scale;
  });
}
inline double reduce_add_f64(const F& a) {
  double r = 0.0;
  for (int i = 0; i < 16; ++i) r += a.v[i];
  return r;
}
inline int compress_store(float* p, const Mask& m, const F& a) {
  int count = 0;
  for (int i = 0; i < 16; ++i)
    if (m.v[i]) std::memcpy(p + count++, &a.v[i], 4);  // p may hold integers
  return count;
}

inline int compress_ids(int32_t* p, const Mask& m, int32_t first) {
  int count = 0;
  for (int i = 0; i < 16; ++i)
    if (m.v[i]) p[count++] = first + i;
  return count;
}

// bf16 cache, f32 operands: an element is the upper half of a float.
struct Bf16Dot {
  struct Operand {
    float even, odd;
  };
  static constexpr int kStep = 2;
  struct Loaded {
    F even, odd;
  };
  struct Spread {
    float even, odd;
  };
  static Loaded load16(const uint32_t* p) {
    Loaded r;
    for (int i = 0; i < 16; ++i) {
      const uint32_t even = p[i] << 16, odd = p[i] & 0xffff0000u;
      std::memcpy(&r.even.v[i], &even, 4);
      std::memcpy(&r.odd.v[i], &odd, 4);
    }
    return r;
  }
  static Spread spread(const Operand* b) { return {b->even, b->odd}; }
  static F dot(const F& acc, const Loaded& a, const Spread& b) {
    return each([&](int i) { return acc.v[i] + a.even.v[i] * b.even + a.odd.v[i] * b.odd; });
  }
  static void pack16(Operand* to, const F& a) { store(&to->even, a); }
};

constexpr int kScoreRows = 2;
constexpr int score_blocks(int /*rows*/) { return 1; }
constexpr int kValueRows = 2;
constexpr int kValueVectors = 1;

inline void prefetch(const void*) {}

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
