// Draws from softmax(z / T), cut by top_k, then top_p, then min_p, by inverting the distribution over ascending ids.
//
// Nothing is sorted. Without top_k and top_p the row is streamed twice; else a bound on the value gathers the candidates
// (a lower bound on the k-th value from the maxima of groups; on the top_p cut from the mass above a few fixed values),
// and a selection among them finds the cut.
#include "cut.h"
#include "kernels.h"
#include "row_plan.h"
#include "simd.h"

namespace etserve::cpu::ETSERVE_ISA {
namespace {

constexpr double kTopPSlack = 1e-7;  // top_p arrives as f32: 0.3 of ten equal tokens is three
constexpr int kNumSteps = 8;
constexpr float kSteps[kNumSteps] = {-1.5f, -3.0f, -4.5f, -6.0f, -7.5f, -9.0f, -11.0f, -13.0f};  // of (z - max) / T

class Sampler {
 public:
  Sampler(const SampleArgs& args, float* scratch) : a_(args), plan_(args.vocab) {
    keys_ = scratch;
    weights_ = keys_ + plan_.entries;
    ids_ = reinterpret_cast<int32_t*>(weights_ + plan_.entries);
    work_keys_ = weights_ + 2 * plan_.entries;
    work_weights_ = work_keys_ + plan_.entries;
    maxima_ = work_weights_ + plan_.entries;
    work_maxima_ = maxima_ + 16 * plan_.chunks;
    sums_ = reinterpret_cast<double*>(work_maxima_ + 16 * plan_.chunks);
  }

  void draw(int64_t row) {
    z_ = a_.logits + row * a_.stride;
    inverse_ = smaller(1.0f / a_.temperature[row], 1e30f);
    min_p_ = a_.min_p[row];
    token_ = -1;
    entropy_ = kNaN;
    if (find_maximum()) {
      const int64_t k = a_.top_k[row];
      const bool by_rank = k > 0 && k < a_.vocab, by_mass = a_.top_p[row] < 1.0f;
      if (by_rank || by_mass)
        draw_from_candidates(row, by_rank ? k : 0, by_mass);
      else
        draw_from_all(a_.uniform[row]);
    }
    a_.token_ids[row] = token_;
    a_.sampled_entropy[row] = entropy_;
  }

 private:
  F entries(int64_t at) const {
    return at + kLanes <= a_.vocab ? load(z_ + at) : load_below(z_ + at, static_cast<int>(a_.vocab - at), -kInf);
  }
  int64_t chunk_end(int64_t chunk) const { return smaller((chunk + 1) * kSampleChunk, a_.vocab); }
  F exponent(F z) const { return max(set1(-104.0f), mul(sub(z, set1(maximum_)), set1(inverse_))); }

  // False if there is nothing to draw from. Leaves the maximum of every group of 16 (one lane of a chunk) in maxima_.
  bool find_maximum() {
    F top = set1(-kInf);
    uint32_t unusable = 0;
    for (int64_t chunk = 0; chunk < plan_.chunks; ++chunk) {
      F best = set1(-kInf);
      for (int64_t i = chunk * kSampleChunk; i < chunk_end(chunk); i += kLanes) {
        const F x = entries(i);
        unusable |= ~bits(less(x, set1(kInf)));
        best = max(best, x);
      }
      store(maxima_ + chunk * kLanes, best);
      top = max(top, best);
    }
    maximum_ = reduce_max(top);
    return (unusable & 0xffffu) == 0 && maximum_ > -kInf;
  }

  void draw_from_all(double uniform) {
    double z = 0.0, s1 = 0.0;
    for (int64_t chunk = 0; chunk < plan_.chunks; ++chunk) {
      F sum = zero(), sum1 = zero();
      for (int64_t i = chunk * kSampleChunk; i < chunk_end(chunk); i += kLanes) {
        const F x = exponent(entries(i));
        const F w = kept_weight(x);
        sum = add(sum, w);
        sum1 = fma(w, x, sum1);
      }
      sums_[chunk] = reduce_add_f64(sum);
      z += sums_[chunk];
      s1 += reduce_add_f64(sum1);
    }
    set_entropy(z, s1);
    find_token(uniform * z);
  }

  F kept_weight(F x) const {
    const F w = exp_negative(x);
    return min_p_ > 0.0f ? select(at_least(w, set1(min_p_)), w, zero()) : w;
  }

  void find_token(double target) {
    double passed = 0.0;
    int64_t chunk = 0, last_full = 0;
    for (; chunk < plan_.chunks; ++chunk) {
      if (sums_[chunk] > 0.0) last_full = chunk;
      if (passed + sums_[chunk] > target) break;
      passed += sums_[chunk];
    }
    if (chunk == plan_.chunks) chunk = last_full;
    float w[kLanes];
    for (int64_t i = chunk * kSampleChunk; i < chunk_end(chunk); i += kLanes) {
      store(w, kept_weight(exponent(entries(i))));
      for (int lane = 0; lane < kLanes; ++lane) {
        if (!(w[lane] > 0.0f)) continue;
        passed += w[lane];
        token_ = static_cast<int32_t>(i) + lane;  // the chunk's last one if rounding leaves the target unreached
        if (passed > target) return;
      }
    }
  }

  void draw_from_candidates(int64_t row, int64_t k, bool by_mass) {
    int64_t n = gather(k > 0 ? rank_bound(k) : mass_bound(a_.top_p[row]));
    if (k > 0 && n > k) n = keep(find_cut_copy(n, false, static_cast<double>(k)), n);
    for (int64_t i = 0; i < n; i += kLanes) store(weights_ + i, exp_negative(exponent(load(keys_ + i))));
    if (by_mass) {
      double total = 0.0;
      for (int64_t i = 0; i < n; ++i) total += weights_[i];
      if (k == 0) total = total_;  // of the whole row
      const double need = larger(total * a_.top_p[row] * (1.0 - kTopPSlack), 1e-30);
      n = keep(find_cut_copy(n, true, need), n);
    }
    draw_from_kept(n, a_.uniform[row]);
  }

  // At most the k-th largest value: the k-th largest of the maxima of disjoint groups.
  float rank_bound(int64_t k) {
    int64_t groups = plan_.chunks;
    if (2 * k <= groups) {
      for (int64_t c = 0; c < groups; ++c) work_maxima_[c] = reduce_max(load(maxima_ + c * kLanes));
    } else {
      groups *= kLanes;
      std::memcpy(work_maxima_, maxima_, sizeof(float) * static_cast<size_t>(groups));
    }
    return k <= groups ? find_cut(work_maxima_, nullptr, groups, static_cast<double>(k)).value : -kInf;
  }

  // A value above which surely lies top_p of the mass. Leaves the mass of the row in total_.
  float mass_bound(float top_p) {
    double masses[kNumSteps] = {};
    total_ = 0.0;
    for (int64_t chunk = 0; chunk < plan_.chunks; ++chunk) {
      F sum = zero(), above[kNumSteps];
      for (F& f : above) f = zero();
      for (int64_t i = chunk * kSampleChunk; i < chunk_end(chunk); i += kLanes) {
        const F x = exponent(entries(i)), w = exp_negative(x);
        sum = add(sum, w);
        for (int s = 0; s < kNumSteps; ++s) above[s] = add(above[s], select(at_least(x, set1(kSteps[s])), w, zero()));
      }
      total_ += reduce_add_f64(sum);
      for (int s = 0; s < kNumSteps; ++s) masses[s] += reduce_add_f64(above[s]);
    }
    for (int s = 0; s < kNumSteps; ++s)
      if (masses[s] * (1.0 - 1e-5) >= top_p * total_)  // with room for the rounding of x
        return maximum_ + kSteps[s] / inverse_ * 1.00001f - 1e-6f * larger(maximum_, -maximum_);
    return -kInf;
  }

  // Candidates z >= bound to keys_ and ids_, ascending; lanes behind the last are -inf.
  int64_t gather(float bound) {
    int64_t n = 0;
    const F floor = set1(larger(bound, -std::numeric_limits<float>::max()));
    for (int64_t i = 0; i < a_.vocab; i += kLanes) {
      const F x = entries(i);
      const Mask taken = at_least(x, floor);
      if (bits(taken) == 0) continue;
      compress_ids(ids_ + n, taken, static_cast<int32_t>(i));
      n += compress_store(keys_ + n, taken, x);
    }
    store(keys_ + n, set1(-kInf));
    return n;
  }

  Cut find_cut_copy(int64_t n, bool weighted, double need) {
    std::memcpy(work_keys_, keys_, sizeof(float) * static_cast<size_t>(n));
    if (weighted) std::memcpy(work_weights_, weights_, sizeof(float) * static_cast<size_t>(n));
    return find_cut(work_keys_, weighted ? work_weights_ : nullptr, n, need);
  }

  int64_t keep(Cut cut, int64_t n) {
    const F bar = set1(cut.value);
    float* ids = reinterpret_cast<float*>(ids_);  // moved as they are
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
      const F x = load_keys(keys_ + i, n - i), w = load_weights(weights_ + i, n - i), id = load(ids + i);
      uint32_t wanted = bits(less(bar, x));
      for (uint32_t equal = bits(at_least(x, bar)) & ~wanted; equal != 0 && cut.ties > 0; equal &= equal - 1, --cut.ties)
        wanted |= equal & (~equal + 1);
      const Mask mask = from_bits(wanted);
      compress_store(ids + kept, mask, id);
      compress_store(weights_ + kept, mask, w);
      kept += compress_store(keys_ + kept, mask, x);
    }
    store(keys_ + kept, set1(-kInf));
    return kept;
  }

  void draw_from_kept(int64_t n, double uniform) {
    double z = 0.0, s1 = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const float w = weights_[i] = weights_[i] >= min_p_ ? weights_[i] : 0.0f;
      z += w;
      if (w > 0.0f) s1 += static_cast<double>(w) * (static_cast<double>(keys_[i]) - maximum_) * inverse_;
    }
    set_entropy(z, s1);
    double passed = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      if (!(weights_[i] > 0.0f)) continue;
      passed += weights_[i];
      token_ = ids_[i];
      if (passed > uniform * z) return;
    }
  }

  void set_entropy(double z, double s1) { entropy_ = static_cast<float>(larger(::log(z) - s1 / z, 0.0)); }

  const SampleArgs& a_;
  const SampleScratch plan_;
  float *keys_, *weights_, *work_keys_, *work_weights_;  // [vocab + 16]
  int32_t* ids_;                                         // [vocab + 16]
  float *maxima_, *work_maxima_;                         // [chunks][16]
  double* sums_;                                         // [chunks]
  const float* z_ = nullptr;
  float inverse_ = 0.0f, min_p_ = 0.0f, maximum_ = 0.0f, entropy_ = 0.0f;
  double total_ = 0.0;
  int32_t token_ = -1;
};

}  // namespace

// Called right after a barrier; returns behind one.
void sample(const SampleArgs& args, Team& team) {
  const auto base = (reinterpret_cast<uintptr_t>(args.scratch) + 63) & ~uintptr_t{63};
  Sampler sampler(args, reinterpret_cast<float*>(base) + team.rank() * SampleScratch(args.vocab).per_thread);
  for (int64_t row = team.next(); row < args.rows; row = team.next()) sampler.draw(row);
  team.barrier();
}

}  // namespace etserve::cpu::ETSERVE_ISA
