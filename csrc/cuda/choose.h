// Which blocks a KV head reads: skipped are those of least mass while the sum stays within epsilon, ties by index, none
// that a guard holds. Masses are whole numbers of 2^-30, so sums are exact in any order. The law:
// etserve/kernels/reference_selection.py.
#pragma once
#include "sketch.h"

namespace etserve::cuda {
namespace {

constexpr int kChooseThreads = 256;
constexpr int kBuckets = 256;
constexpr int kBySketch = 0, kAtRandom = 1;
constexpr float kMassUnits = 1073741824.0f;  // 2^30

__device__ int blocks_of(const EtserveSelect& a, int seq) { return (a.context_lens[seq] + kBlockTokens - 1) / kBlockTokens; }
__device__ bool selects(const EtserveSelect& a, int seq) {
  return a.epsilon[seq] > 0.0f && a.context_lens[seq] >= a.min_context;
}
__device__ Count mixed(Count x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// One sequence and KV head; every thread has the same values.
struct Choice {
  const EtserveSelect& a;
  int seq, kv_head, total;
  int64_t first;    // of its row in arrays [num_seqs][num_kv_heads][max_blocks]
  uint32_t* keys;   // [total], in whole units; a thread reads what it wrote itself

  __device__ bool is_always_read(int i) const {
    return i < a.sink_blocks || i >= total - a.recent_blocks ||
           (a.is_protected != nullptr && a.is_protected[static_cast<int64_t>(seq) * a.max_blocks + i] != 0);
  }

  // The largest share of each block over the group's heads. False if one is unknown.
  __device__ bool estimate() const {
    const int group = a.num_heads / a.num_kv_heads;
    for (int r = 0; r < group; ++r) {
      const float* masses = a.log_mass + (static_cast<int64_t>(seq) * a.num_heads + kv_head * group + r) * a.max_blocks;
      float top = -infinity(), sum = 0.0f;
      bool is_known = true;
      for (int i = threadIdx.x; i < total; i += kChooseThreads) {
        is_known = is_known && masses[i] < infinity();
        top = fmaxf(top, masses[i]);
      }
      top = block_max<kChooseThreads>(top);
      for (int i = threadIdx.x; i < total; i += kChooseThreads) sum += expf(masses[i] - top);
      sum = block_sum<kChooseThreads>(sum);
      if (__syncthreads_count(!is_known || !(sum > 0.0f && sum < infinity())) > 0) return false;
      for (int i = threadIdx.x; i < total; i += kChooseThreads) {
        const uint32_t share = static_cast<uint32_t>(__float2ull_rn(expf(masses[i] - top) * (kMassUnits / sum)));
        keys[i] = r == 0 || share > keys[i] ? share : keys[i];
      }
    }
    return true;
  }

  // Smaller is skipped first: older ones, or at random.
  __device__ void draw() const {
    const Count place = static_cast<Count>(a.context_lens[seq]) << 32 | static_cast<Count>(kv_head) << 24;
    const Count start = mixed(a.seed ^ place);
    for (int i = threadIdx.x; i < total; i += kChooseThreads) {
      const Count drawn = mixed(start + static_cast<Count>(i)) >> 40;
      keys[i] = static_cast<uint32_t>(a.selector == kAtRandom ? drawn : static_cast<Count>(i));
    }
  }

  // How many may go.
  __device__ int spare() const {
    const double share = a.selector == kBySketch || a.share < a.min_kept_share ? a.min_kept_share : a.share;
    int least = static_cast<int>(ceil(share * total));
    least = least > a.min_kept_blocks ? least : a.min_kept_blocks;
    least = least > 1 ? least : 1;
    return total > least ? total - least : 0;
  }
};

// Skipped are the keys below `key` and, in order of index, the first `num_equal` of those that equal it.
struct Cut {
  uint32_t key;
  int num_equal;
  Count sum;  // of what is skipped
};

// Radix selection: in four passes, from the highest byte, whole buckets go while they fit.
__device__ Cut find_cut(const Choice& choice, Count budget, int left) {
  ETSERVE_SHARED(int, counts, kBuckets);
  ETSERVE_SHARED(Count, sums, kBuckets);
  ETSERVE_SHARED(int, gone, 1);
  ETSERVE_SHARED(Count, gone_sum, 1);
  uint32_t prefix = 0;
  Count sum = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    counts[threadIdx.x] = 0, sums[threadIdx.x] = 0;
    if (threadIdx.x == 0) gone[0] = 0, gone_sum[0] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < choice.total; i += kChooseThreads) {
      const uint32_t key = choice.keys[i];
      if (choice.is_always_read(i) || (shift < 24 && key >> (shift + 8) != prefix)) continue;
      atomicAdd(&counts[key >> shift & 255u], 1);
      atomicAdd(&sums[key >> shift & 255u], static_cast<Count>(key));
    }
    __syncthreads();
    int all;
    const int own = counts[threadIdx.x], count = block_scan<kChooseThreads>(own, all);
    Count mass;
    const Count mass_here = block_scan<kChooseThreads>(sums[threadIdx.x], mass);
    const bool fits = count <= left && mass_here <= budget - sum;
    const int bucket = __syncthreads_count(fits);
    if (bucket == kBuckets) return {0xffffffffu, 0, sum + mass};  // all go: at the first pass only
    if (static_cast<int>(threadIdx.x) == bucket - 1) gone[0] = count, gone_sum[0] = mass_here;
    __syncthreads();
    left -= gone[0], sum += gone_sum[0];
    prefix = prefix << 8 | static_cast<uint32_t>(bucket);
  }
  const int there = counts[prefix & 255u];
  int num_equal = there < left ? there : left;
  if (prefix > 0 && static_cast<Count>(num_equal) > (budget - sum) / prefix) num_equal = static_cast<int>((budget - sum) / prefix);
  return {prefix, num_equal, sum + static_cast<Count>(prefix) * static_cast<Count>(num_equal)};
}

// Lists what stays, in order; returns how many.
__device__ int write_list(const Choice& choice, Cut cut) {
  int num_kept = 0, equal = 0;
  for (int tile = 0; tile < choice.total; tile += kChooseThreads) {
    const int i = tile + static_cast<int>(threadIdx.x);
    const bool is_there = i < choice.total;
    const bool may_go = is_there && !choice.is_always_read(i);
    const uint32_t key = is_there ? choice.keys[i] : 0;
    const bool is_equal = may_go && key == cut.key;
    int num_equal, num_here;
    const int rank = equal + block_scan<kChooseThreads>(is_equal ? 1 : 0, num_equal) - 1;
    const bool stays = is_there && !(may_go && key < cut.key) && !(is_equal && rank < cut.num_equal);
    const int place = num_kept + block_scan<kChooseThreads>(stays ? 1 : 0, num_here) - 1;
    if (stays) choice.a.kept[choice.first + place] = i;
    equal += num_equal, num_kept += num_here;
  }
  return num_kept;
}

// One block of threads per sequence and KV head.
__global__ void __launch_bounds__(kChooseThreads) choose(EtserveSelect a) {
  const int seq = blockIdx.y, kv_head = blockIdx.x;
  const int64_t head = static_cast<int64_t>(seq) * a.num_kv_heads + kv_head;
  const int64_t first = head * a.max_blocks;
  const Choice choice{a, seq, kv_head, blocks_of(a, seq), first, a.keys + first};
  const bool by_sketch = a.selector == kBySketch;
  bool is_known = selects(a, seq);
  if (is_known && by_sketch) is_known = choice.estimate();
  if (is_known && !by_sketch) choice.draw();
  int num_kept = choice.total;
  float missing = 0.0f;
  if (is_known) {
    const Count budget = by_sketch ? static_cast<Count>(static_cast<double>(a.epsilon[seq]) * kMassUnits) : ~Count{0};
    const Cut cut = find_cut(choice, budget, choice.spare());
    num_kept = write_list(choice, cut);
    missing = by_sketch ? static_cast<float>(cut.sum) / kMassUnits : nan();
  } else {
    for (int i = threadIdx.x; i < choice.total; i += kChooseThreads) a.kept[first + i] = i;
  }
  if (threadIdx.x == 0) a.num_kept[head] = num_kept, a.missing[head] = missing;
  for (int i = threadIdx.x; a.estimated_mass != nullptr && i < a.max_blocks; i += kChooseThreads) {
    const float mass = i < choice.total && is_known ? static_cast<float>(choice.keys[i]) / kMassUnits : 0.0f;
    a.estimated_mass[first + i] = is_known && by_sketch ? mass : nan();
  }
}

}  // namespace
}  // namespace etserve::cuda
