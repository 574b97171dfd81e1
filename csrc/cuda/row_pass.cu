// One pass over logits: log-sum-exp, entropy, varentropy, the likeliest tokens.
//
// With x = z - m, Z = sum e^x, S1 = sum x e^x, S2 = sum x^2 e^x:  H = ln Z - S1 / Z,  V = S2 / Z - (S1 / Z)^2. Every
// thread keeps these of its own entries relative to its own maximum; they merge by shifting to the larger m
// (etserve/control/entropy.py is the oracle). A row is cut into chunks of fixed size, one block of threads each; a
// second kernel merges a row's chunks in order, in double.
//
// The likeliest k: the k-th largest of the threads' maxima bounds the k-th largest entry from below, and only k threads
// reach it, so at most k * 64 entries are candidates and only those threads look at their entries again.
#include "device.h"

namespace etserve::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 64;
constexpr int64_t kChunk = kThreads * kPerThread;
constexpr int kMaxTop = 64;
constexpr int kMaxCandidates = kMaxTop * kPerThread;

struct Moments {
  float maximum, z, s1, s2;
  int32_t nonfinite;
};
struct Scratch {
  Moments* moments;  // [rows][chunks]
  Count* keys;       // [rows][chunks][k], descending; 0: none
  int32_t chunks, k;
};

__device__ Count make_key(float value, int32_t id) {
  return static_cast<Count>(ordered(value)) << 32 | ~static_cast<unsigned>(id);
}
__device__ int32_t id_of(Count key) { return static_cast<int32_t>(~static_cast<unsigned>(key)); }

// Eight entries from `first` on; -inf behind the end. The same entries whatever the address.
template <class T>
__device__ __forceinline__ void load(const T* z, int64_t left, float (&x)[8]) {
  if (left >= 8 && is_aligned(z)) {
    const Eight<T> eight = *reinterpret_cast<const Eight<T>*>(z);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = widen(eight.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = i < left ? widen(z[i]) : -infinity();
  }
}

__device__ __forceinline__ void shift(Moments& a, float to) {
  const float d = a.maximum - to, e = __expf(d);
  a.s2 = e * (a.s2 + d * (2.0f * a.s1 + d * a.z));
  a.s1 = e * (a.s1 + d * a.z);
  a.z *= e;
  a.maximum = to;
}

__device__ __forceinline__ void observe(float (&x)[8], int32_t first, Moments& mine, int32_t& best) {
  bool usable = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) usable = usable && x[i] < infinity();
  if (!usable) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (!(x[i] < infinity())) ++mine.nonfinite, x[i] = -infinity();
  }
  float top = x[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) top = fmaxf(top, x[i]);
  if (top > mine.maximum) {
    if (mine.z > 0.0f) shift(mine, top);
    mine.maximum = top;
#pragma unroll
    for (int i = 7; i >= 0; --i)
      if (x[i] == top) best = first + i;
  }
  if (!(mine.maximum > -infinity())) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float y = fmaxf(x[i] - mine.maximum, -104.0f);  // e^-104 is 0, and 0 * -inf is not
    const float e = __expf(y), t = e * y;
    mine.z += e;
    mine.s1 += t;
    mine.s2 += t * y;
  }
}

// The k-th largest of the threads' keys, or 0 where fewer than k have one.
__device__ Count kth_largest(Count mine, int k) {
  Count bound = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const Count trial = bound | Count{1} << bit;
    const int reached = __syncthreads_count(mine >= trial);
    if (reached >= k) bound = trial;
    if (reached == k) break;
  }
  return bound;
}

template <class T>
__device__ void find_top(const T* chunk, int64_t count, int32_t first_id, Count mine, int k, Count* out) {
  ETSERVE_SHARED(Count, candidates, kMaxCandidates);
  ETSERVE_SHARED(int, num_candidates, 1);
  if (threadIdx.x == 0) *num_candidates = 0;
  const Count bound = kth_largest(mine, k);
  __syncthreads();
  if (mine != 0 && mine >= bound) {
    for (int64_t i = threadIdx.x * 8; i < count; i += kThreads * 8) {
      float x[8];
      load(chunk + i, count - i, x);
      for (int j = 0; j < 8; ++j) {
        if (!(x[j] > -infinity() && x[j] < infinity())) continue;
        const Count key = make_key(x[j], first_id + static_cast<int32_t>(i) + j);
        if (key >= bound) candidates[atomicAdd(num_candidates, 1)] = key;
      }
    }
  }
  __syncthreads();
  const int n = *num_candidates;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    int rank = 0;
    for (int j = 0; j < n; ++j) rank += candidates[j] > candidates[i] ? 1 : 0;
    if (rank < k) out[rank] = candidates[i];
  }
  for (int i = n + threadIdx.x; i < k; i += kThreads) out[i] = 0;
}

template <class T>
__global__ void __launch_bounds__(kThreads) measure_chunk(EtserveRowPass a, Scratch scratch) {
  const int64_t row = blockIdx.x / scratch.chunks, chunk = blockIdx.x % scratch.chunks;
  const int64_t begin = chunk * kChunk, left = a.vocab - begin, count = left < kChunk ? left : kChunk;
  const T* z = static_cast<const T*>(a.logits) + row * a.stride + begin;
  Moments mine{-infinity(), 0.0f, 0.0f, 0.0f, 0};
  int32_t best = -1;
  for (int64_t i = threadIdx.x * 8; i < count; i += kThreads * 8) {
    float x[8];
    load(z + i, count - i, x);
    observe(x, static_cast<int32_t>(begin + i), mine, best);
  }
  const Count key = best < 0 ? 0 : make_key(mine.maximum, best);
  const float maximum = block_max<kThreads>(mine.maximum);
  if (best >= 0) shift(mine, maximum);
  const float total = block_sum<kThreads>(mine.z), s1 = block_sum<kThreads>(mine.s1);
  const float s2 = block_sum<kThreads>(mine.s2);
  const int nonfinite = block_sum<kThreads>(mine.nonfinite);
  if (threadIdx.x == 0) scratch.moments[blockIdx.x] = {maximum, total, s1, s2, nonfinite};
  find_top(z, count, static_cast<int32_t>(begin), key, scratch.k, scratch.keys + blockIdx.x * int64_t{scratch.k});
}

__device__ void merge_moments(const EtserveRowPass& a, const Moments* parts, int chunks, int64_t row) {
  float maximum = -infinity();
  int32_t nonfinite = 0;
  for (int c = 0; c < chunks; ++c) {
    maximum = fmaxf(maximum, parts[c].maximum);
    nonfinite += parts[c].nonfinite;
  }
  a.nonfinite[row] = nonfinite;
  a.log_sum_exp[row] = nonfinite != 0 ? nan() : -infinity();
  a.entropy[row] = a.varentropy[row] = nan();
  if (nonfinite != 0 || !(maximum > -infinity())) return;
  double z = 0.0, s1 = 0.0, s2 = 0.0;
  for (int c = 0; c < chunks; ++c) {
    const Moments p = parts[c];
    if (!(p.maximum > -infinity())) continue;
    const double d = static_cast<double>(p.maximum) - maximum, e = exp(d);
    z += e * p.z;
    s1 += e * (p.s1 + d * p.z);
    s2 += e * (p.s2 + 2.0 * d * p.s1 + d * d * p.z);
  }
  const double mean = s1 / z;
  a.log_sum_exp[row] = static_cast<float>(maximum + log(z));
  a.entropy[row] = static_cast<float>(fmax(log(z) - mean, 0.0));
  a.varentropy[row] = static_cast<float>(fmax(s2 / z - mean * mean, 0.0));
}

__global__ void __launch_bounds__(kThreads) merge_chunks(EtserveRowPass a, Scratch scratch) {
  const int64_t row = blockIdx.x;
  const int n = scratch.chunks * scratch.k;
  const Count* keys = scratch.keys + row * n;
  if (threadIdx.x == 0) {
    merge_moments(a, scratch.moments + row * scratch.chunks, scratch.chunks, row);
    a.argmax[row] = -1;
  }
  for (int i = threadIdx.x; i < a.k; i += kThreads) {
    a.top_values[row * a.k + i] = -infinity();
    a.top_ids[row * a.k + i] = -1;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const Count key = keys[i];
    if (key == 0) continue;
    int rank = 0;
    for (int j = 0; j < n && rank < scratch.k; ++j) rank += keys[j] > key ? 1 : 0;
    if (rank == 0) a.argmax[row] = id_of(key);
    if (rank >= a.k) continue;
    a.top_values[row * a.k + rank] = from_ordered(static_cast<unsigned>(key >> 32));
    a.top_ids[row * a.k + rank] = id_of(key);
  }
}

}  // namespace
}  // namespace etserve::cuda

using namespace etserve::cuda;

extern "C" int64_t etserve_cuda_row_pass_scratch_bytes(int64_t rows, int64_t vocab, int32_t k) {
  const int64_t items = rows * ceil_div(vocab, kChunk);
  return items * (k > 1 ? k : 1) * static_cast<int64_t>(sizeof(Count)) + items * static_cast<int64_t>(sizeof(Moments));
}

extern "C" int etserve_cuda_row_pass(const EtserveRowPass* args, void* stream) {
  const int64_t chunks = ceil_div(args->vocab, kChunk);
  if (args->vocab < 1 || args->vocab > kMaxVocab || args->k < 0 || args->k > kMaxTop) return kInvalidValue;
  if (args->rows < 0 || args->rows * chunks > kMaxGrid) return kInvalidValue;
  if (args->rows == 0) return 0;
  Scratch scratch{nullptr, static_cast<Count*>(args->scratch), static_cast<int32_t>(chunks), args->k > 1 ? args->k : 1};
  scratch.moments = reinterpret_cast<Moments*>(scratch.keys + args->rows * chunks * scratch.k);
  const int code = with_type(args->dtype, [&](auto element) {
    using T = decltype(element);
    return launch(measure_chunk<T>, dim3(static_cast<unsigned>(args->rows * chunks)), kThreads, stream, *args, scratch);
  });
  if (code != 0) return code;
  return launch(merge_chunks, dim3(static_cast<unsigned>(args->rows)), kThreads, stream, *args, scratch);
}
