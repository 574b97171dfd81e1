// One pass over logits: log-sum-exp, entropy, varentropy, the likeliest tokens.
//
// With x = z - m, Z = sum e^x, S1 = sum x e^x, S2 = sum x^2 e^x over a tile of fixed size:
//   H = ln Z - S1 / Z,  V = S2 / Z - (S1 / Z)^2,
// and tiles merge, in order and in double, by shifting to the larger m (etserve/control/entropy.py is the oracle).
#include "kernels.h"
#include "row_plan.h"
#include "simd.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

// Ids come in ascending, so an equal value stays behind those already there.
inline void insert(TopList* top, int k, float value, int32_t id) {
  if (top->count == k && !(value > top->values[k - 1])) return;
  int at = top->count < k ? top->count++ : k - 1;
  for (; at > 0 && top->values[at - 1] < value; --at) {
    top->values[at] = top->values[at - 1];
    top->ids[at] = top->ids[at - 1];
  }
  top->values[at] = value;
  top->ids[at] = id;
}

inline float threshold(const TopList& top, int k) { return top.count < k ? -kInf : top.values[k - 1]; }

inline F load_tile(const float* z, int64_t left) {
  return left >= kLanes ? load(z) : load_below(z, static_cast<int>(left), -kInf);
}

// Maximum and top k of the tile's finite entries, count of NaN and +inf.
void scan(const float* z, int64_t count, int32_t first_id, int k, RowPartial* partial, TopList* top) {
  F maxima = set1(-kInf);
  const F infinite = set1(kInf);
  F bar = set1(threshold(*top, k));
  for (int64_t i = 0; i < count; i += kLanes) {
    F x = load_tile(z + i, count - i);
    const Mask usable = less(x, infinite);
    if (bits(usable) != 0xffffu) {
      partial->nonfinite += kLanes - __builtin_popcount(bits(usable));
      x = select(usable, x, set1(-kInf));
    }
    maxima = max(maxima, x);
    uint32_t better = bits(less(bar, x));
    if (better == 0) continue;
    for (; better != 0; better &= better - 1) {
      const int lane = __builtin_ctz(better);
      insert(top, k, z[i + lane], first_id + static_cast<int32_t>(i) + lane);
    }
    bar = set1(threshold(*top, k));
  }
  partial->maximum = reduce_max(maxima);
}

void accumulate(const float* z, int64_t count, RowPartial* partial) {
  const F maximum = set1(partial->maximum), lowest = set1(-104.0f);  // e^-104 is 0, and 0 * -inf is not
  F sum = zero(), sum1 = zero(), sum2 = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const F x = max(lowest, sub(load_tile(z + i, count - i), maximum));
    const F e = exp_negative(x), t = mul(e, x);
    sum = add(sum, e);
    sum1 = add(sum1, t);
    sum2 = fma(t, x, sum2);
  }
  partial->z = reduce_add(sum);
  partial->s1 = reduce_add(sum1);
  partial->s2 = reduce_add(sum2);
}

class Pass {
 public:
  Pass(const RowPassArgs& args, int team_size)
      : a_(args), k_(larger(args.k, 1)), tiles_(row_tiles(args.vocab)), chunks_(row_chunks(args.rows, args.vocab, team_size)) {
    tops_ = static_cast<TopList*>(args.scratch);
    partials_ = reinterpret_cast<RowPartial*>(tops_ + args.rows * chunks_);
  }

  int64_t items() const { return a_.rows * chunks_; }

  void measure(int64_t item) {
    const int64_t row = item / chunks_, chunk = item % chunks_;
    TopList* top = tops_ + item;
    top->count = 0;
    for (int64_t tile = tiles_ * chunk / chunks_; tile < tiles_ * (chunk + 1) / chunks_; ++tile) {
      const int64_t first = tile * kRowTile, count = smaller(kRowTile, a_.vocab - first);
      const float* z = a_.logits + row * a_.stride + first;
      RowPartial* partial = partials_ + row * tiles_ + tile;
      *partial = {-kInf, 0.0f, 0.0f, 0.0f, 0};
      scan(z, count, static_cast<int32_t>(first), k_, partial, top);
      if (partial->nonfinite == 0 && partial->maximum > -kInf) accumulate(z, count, partial);
    }
  }

  void merge(int64_t row) {
    const RowPartial* partials = partials_ + row * tiles_;
    float maximum = -kInf;
    int32_t nonfinite = 0;
    for (int64_t t = 0; t < tiles_; ++t) {
      maximum = larger(maximum, partials[t].maximum);
      nonfinite += partials[t].nonfinite;
    }
    a_.nonfinite[row] = nonfinite;
    if (nonfinite != 0 || maximum == -kInf) {
      a_.log_sum_exp[row] = nonfinite != 0 ? kNaN : -kInf;
      a_.entropy[row] = a_.varentropy[row] = kNaN;
    } else {
      moments(row, partials, maximum);
    }
    merge_top(row);
  }

 private:
  void moments(int64_t row, const RowPartial* partials, float maximum) {
    double z = 0.0, s1 = 0.0, s2 = 0.0;
    for (int64_t t = 0; t < tiles_; ++t) {
      const RowPartial& p = partials[t];
      if (p.maximum == -kInf) continue;
      const double d = static_cast<double>(p.maximum) - maximum, e = ::exp(d);
      z += e * p.z;
      s1 += e * (p.s1 + d * p.z);
      s2 += e * (p.s2 + 2.0 * d * p.s1 + d * d * p.z);
    }
    const double mean = s1 / z, entropy = ::log(z) - mean, varentropy = s2 / z - mean * mean;
    a_.log_sum_exp[row] = static_cast<float>(maximum + ::log(z));
    a_.entropy[row] = static_cast<float>(larger(entropy, 0.0));
    a_.varentropy[row] = static_cast<float>(larger(varentropy, 0.0));
  }

  void merge_top(int64_t row) {
    TopList* top = tops_ + row * chunks_;
    for (int64_t chunk = 1; chunk < chunks_; ++chunk)
      for (int i = 0; i < top[chunk].count; ++i) insert(top, k_, top[chunk].values[i], top[chunk].ids[i]);
    a_.argmax[row] = top->count > 0 ? top->ids[0] : -1;
    for (int i = 0; i < a_.k; ++i) {
      const bool there = i < top->count;
      a_.top_values[row * a_.k + i] = there ? top->values[i] : -kInf;
      a_.top_ids[row * a_.k + i] = there ? top->ids[i] : -1;
    }
  }

  const RowPassArgs& a_;
  const int k_;
  const int64_t tiles_, chunks_;
  TopList* tops_;         // [rows][chunks]
  RowPartial* partials_;  // [rows][tiles]
};

}  // namespace

// Called right after a barrier; returns behind one.
void row_pass(const RowPassArgs& args, Team& team) {
  Pass pass(args, team.size());
  for (int64_t item = team.next(); item < pass.items(); item = team.next()) pass.measure(item);
  team.barrier();
  for (int64_t row = team.next(); row < args.rows; row = team.next()) pass.merge(row);
  team.barrier();
}

}  // namespace etserve::cpu::ETSERVE_ISA
