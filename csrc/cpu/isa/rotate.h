// The rotation of key sketches: Hadamard transforms over runs of the largest power of two that divides the dimension
// (etserve/control/sketch.py, rotate).
#pragma once

namespace etserve::cpu::ETSERVE_ISA {
namespace {

inline int hadamard_run(int dim) { return dim & -dim; }

inline float hadamard_norm(int dim) { return 1.0f / __builtin_sqrtf(static_cast<float>(hadamard_run(dim))); }

// Calls butterfly(i, j), which replaces (x_i, x_j) by (x_i + x_j, x_i - x_j), in the transform's order.
template <class Butterfly>
inline void hadamard(int dim, Butterfly butterfly) {
  const int run = hadamard_run(dim);
  for (int width = 1; width < run; width *= 2)
    for (int start = 0; start < dim; start += 2 * width)
      for (int i = start; i < start + width; ++i) butterfly(i, i + width);
}

}  // namespace
}  // namespace etserve::cpu::ETSERVE_ISA
