// Draws from softmax(z / T), cut by top_k, then top_p, then min_p, by inverting the distribution over ascending ids.
//
// One block of threads per row, no host in between. A token's weight e^((z - max) / T) is an integer, in units of 2^-40:
// integer sums are the same in any order, so a histogram may be filled by atomics and the draw is still a function of
// its row alone. A cut is found digit by digit from the top: the value down to which likeliest-first order goes until a
// count (top_k) or a mass (top_p) is reached, then the last id among those equal to it.
#include "device.h"

namespace etserve::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBins = 2048;
constexpr int kDigits = 3;
constexpr float kUnit = 1099511627776.0f;  // 2^40
constexpr double kTopPSlack = 1e-7;        // relative; top_p is an f32: 0.3 of ten equal tokens is three

struct Cut {  // kept: keys above, and those equal with an id up to last_id
  unsigned key;
  int last_id;
  __device__ bool keeps(unsigned other, int id) const { return other > key || (other == key && id <= last_id); }
};

template <class T>
struct Row {
  const T* z;
  int vocab;
  float maximum, inverse, min_p;
  Cut cut;

  __device__ float exponent(float value) const { return fmaxf((value - maximum) * inverse, -104.0f); }
  // Weight e^x of a token that the cut keeps, else 0.
  __device__ float weight(float value, int id) const {
    return value > -infinity() && cut.keeps(ordered(value), id) ? expf(exponent(value)) : 0.0f;
  }
};

__device__ Count fixed(float weight) { return __float2ull_rn(weight * kUnit); }

// Inclusive sum over the threads before and at this one, and the sum of all.
__device__ Count block_scan(Count mine, Count& total) {
  ETSERVE_SHARED(Count, parts, kWarps);
  const Count within = warp_inclusive_scan(mine);
  __syncthreads();
  if (threadIdx.x % kWarp == kWarp - 1) parts[threadIdx.x / kWarp] = within;
  __syncthreads();
  Count before = 0;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < static_cast<int>(threadIdx.x) / kWarp) before += parts[w];
    total += parts[w];
  }
  return before + within;
}

struct Digit {
  int bin;
  Count above, inside;  // mass above the bin, mass in it
};

// The bin, from the top, in which the mass from `above` on reaches `need`; the histogram reaches it.
__device__ Digit find_digit(const Count* histogram, Count above, Count need) {
  ETSERVE_SHARED(Digit, found, 1);
  const int upper = kBins - 1 - 2 * static_cast<int>(threadIdx.x), lower = upper - 1;
  Count total;
  const Count high = histogram[upper], low = histogram[lower];
  const Count reached = above + block_scan(high + low, total), before = reached - high - low;
  if (before < need && need <= reached) {
    if (before + high >= need)
      *found = {upper, before, high};
    else
      *found = {lower, before + high, low};
  }
  __syncthreads();
  const Digit digit = *found;
  __syncthreads();
  return digit;
}

// Sums of consecutive segments of the row: shared by the draw and by the search for the last of equal ids.
struct Segments {
  Count* masses;      // [kThreads]
  int length;         // ids per segment, a multiple of 32
  Count total;
};

template <class Weight>
__device__ Segments sum_segments(int vocab, Count* masses, Weight weight) {
  const int length = (vocab + kThreads * kWarp - 1) / (kThreads * kWarp) * kWarp;
  const int lane = threadIdx.x % kWarp;
  __syncthreads();
  masses[threadIdx.x] = 0;
  __syncthreads();
  for (int segment = threadIdx.x / kWarp; segment * length < vocab; segment += kWarps) {
    Count sum = 0;
    for (int i = lane; i < length; i += kWarp) {
      const int id = segment * length + i;
      if (id < vocab) sum += weight(id);
    }
    sum = warp_sum(sum);
    if (lane == 0) masses[segment] = sum;
  }
  __syncthreads();
  Segments segments{masses, length, 0};
  block_scan(masses[threadIdx.x], segments.total);
  return segments;
}

// The first id whose cumulated weight exceeds `target`; target < total.
template <class Weight>
__device__ int find_id(const Segments& segments, int vocab, Count target, Weight weight) {
  ETSERVE_SHARED(Count, rest, 1);
  ETSERVE_SHARED(int, found, 1);
  Count total;
  const Count mass = segments.masses[threadIdx.x], reached = block_scan(mass, total);
  if (reached - mass <= target && target < reached) {
    *rest = target - (reached - mass);
    *found = static_cast<int>(threadIdx.x) * segments.length;
  }
  __syncthreads();
  const int first = *found;
  Count left = *rest;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    for (int i = 0; i < segments.length; i += kWarp) {
      const int id = first + i + static_cast<int>(threadIdx.x);
      const Count cumulated = warp_inclusive_scan(id < vocab ? weight(id) : Count{0});
      const unsigned beyond = __ballot_sync(kAllLanes, cumulated > left);
      if (beyond != 0) {
        if (threadIdx.x == 0) *found = first + i + __ffs(beyond) - 1;
        break;
      }
      left -= __shfl_sync(kAllLanes, cumulated, kWarp - 1);
    }
  }
  __syncthreads();
  return *found;
}

// Narrows the row's cut to the likeliest tokens whose weight (by mass, or 1 each) reaches `need` >= 1, which it does.
template <class T>
__device__ void narrow_cut(Row<T>& row, Count need, bool by_mass, Count* histogram, Count* masses) {
  unsigned prefix = 0;
  Digit digit{0, 0, 0};
  for (int level = 0; level < kDigits; ++level) {
    const int shift = level == 0 ? 21 : level == 1 ? 10 : 0, above_shift = level == 0 ? 32 : level == 1 ? 21 : 10;
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) histogram[bin] = 0;
    __syncthreads();
    for (int id = threadIdx.x; id < row.vocab; id += kThreads) {
      const float value = widen(row.z[id]);
      const unsigned key = ordered(value);
      if (static_cast<Count>(key ^ prefix) >> above_shift != 0) continue;
      const float weight = row.weight(value, id);
      const Count counted = by_mass ? fixed(weight) : value > -infinity() && row.cut.keeps(key, id) ? 1 : 0;
      if (counted != 0) atomicAdd(histogram + ((key >> shift) & ((1u << (above_shift - shift)) - 1)), counted);
    }
    __syncthreads();
    digit = find_digit(histogram, digit.above, need);
    prefix |= static_cast<unsigned>(digit.bin) << shift;
  }
  const Count each = by_mass ? fixed(expf(row.exponent(from_ordered(prefix)))) : 1;
  const Count ties = (need - digit.above + each - 1) / each;
  int last = row.vocab;
  if (ties * each < digit.inside) {
    const Row<T> before = row;
    const auto equal = [&](int id) {
      return static_cast<Count>(ordered(widen(before.z[id])) == prefix && before.cut.keeps(prefix, id) ? 1 : 0);
    };
    const Segments segments = sum_segments(row.vocab, masses, equal);
    last = find_id(segments, row.vocab, ties - 1, equal);
  } else if (prefix == row.cut.key) {
    last = row.cut.last_id;
  }
  row.cut = {prefix, last};
}

// Entropy in nats of the weights that are kept: ln Z - (sum w x) / Z, in one fixed order.
template <class T>
__device__ float kept_entropy(const Row<T>& row, Count total) {
  double s1 = 0.0;
  for (int id = threadIdx.x; id < row.vocab; id += kThreads) {
    const float value = widen(row.z[id]), weight = row.weight(value, id);
    if (weight > 0.0f && weight >= row.min_p) s1 += static_cast<double>(weight) * row.exponent(value);
  }
  const double z = static_cast<double>(total) / kUnit;
  return static_cast<float>(fmax(log(z) - block_sum<kThreads>(s1) / z, 0.0));
}

// False if there is nothing to draw from.
template <class T>
__device__ bool find_maximum(Row<T>& row) {
  float top = -infinity();
  int unusable = 0;
  for (int id = threadIdx.x; id < row.vocab; id += kThreads) {
    const float value = widen(row.z[id]);
    unusable += value < infinity() ? 0 : 1;
    top = fmaxf(top, value);
  }
  row.maximum = block_max<kThreads>(top);
  return block_sum<kThreads>(unusable) == 0 && row.maximum > -infinity();
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) draw(EtserveSample a) {
  ETSERVE_SHARED(Count, histogram, kBins);
  ETSERVE_SHARED(Count, masses, kThreads);
  const int64_t r = blockIdx.x;
  Row<T> row{static_cast<const T*>(a.logits) + r * a.stride, static_cast<int>(a.vocab), 0.0f,
             fminf(1.0f / a.temperature[r], 1e30f), a.min_p[r], {0, 0}};
  if (!find_maximum(row)) {
    if (threadIdx.x == 0) a.token_ids[r] = -1, a.sampled_entropy[r] = nan();
    return;
  }
  const auto mass_of = [&](int id) { return fixed(row.weight(widen(row.z[id]), id)); };
  const int k = a.top_k[r];
  if (k > 0 && k < row.vocab) {
    const auto one = [&](int id) { return Count{widen(row.z[id]) > -infinity() ? 1u : 0u}; };
    if (sum_segments(row.vocab, masses, one).total > static_cast<Count>(k))
      narrow_cut(row, static_cast<Count>(k), false, histogram, masses);
  }
  if (a.top_p[r] < 1.0f) {
    const double total = static_cast<double>(sum_segments(row.vocab, masses, mass_of).total);
    const double need = ceil(total * a.top_p[r] * (1.0 - kTopPSlack));
    narrow_cut(row, need < 1.0 ? Count{1} : static_cast<Count>(need), true, histogram, masses);
  }
  const auto kept = [&](int id) {
    const float weight = row.weight(widen(row.z[id]), id);
    return weight >= row.min_p ? fixed(weight) : Count{0};
  };
  const Segments segments = sum_segments(row.vocab, masses, kept);
  const Count wanted = static_cast<Count>(a.uniform[r] * static_cast<double>(segments.total));
  const int id = find_id(segments, row.vocab, wanted < segments.total ? wanted : segments.total - 1, kept);
  const float entropy = kept_entropy(row, segments.total);
  if (threadIdx.x == 0) a.token_ids[r] = id, a.sampled_entropy[r] = entropy;
}

}  // namespace
}  // namespace etserve::cuda

using namespace etserve::cuda;

extern "C" int etserve_cuda_sample(const EtserveSample* args, void* stream) {
  if (args->vocab < 1 || args->vocab > kMaxVocab || args->rows < 0 || args->rows > kMaxGrid) return kInvalidValue;
  if (args->rows == 0) return 0;
  return with_type(args->dtype, [&](auto element) {
    using T = decltype(element);
    return launch(draw<T>, dim3(static_cast<unsigned>(args->rows)), kThreads, stream, *args);
  });
}
