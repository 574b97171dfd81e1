// What one warp does in decode attention: see attention.cu.
#pragma once
#include "device.h"

namespace etserve::cuda {
namespace {

struct Span {  // of positions: a sequence's own, or the window's
  int begin, end;
};
__device__ Span visible(const EtserveDecode& a, int seq) {
  const int end = a.context_lens[seq];
  return {a.window > 0 && end > a.window ? end - a.window : 0, end};
}

// The blocks that a KV head reads: the first `count` of them, or those listed.
struct Reads {
  const int32_t* list;  // null: all
  int count;
};
__device__ Reads reads_of(const EtserveDecode& a, int seq, int kv_head) {
  if (a.kept == nullptr) return {nullptr, (a.context_lens[seq] + kBlockTokens - 1) / kBlockTokens};
  const int64_t head = static_cast<int64_t>(seq) * a.num_kv_heads + kv_head;
  return {a.kept + head * a.max_blocks, a.num_kept[head]};
}

// One softmax on its way, for 8 dimensions of kHeads heads.
template <int kHeads>
struct Stream {
  float maximum[kHeads], sum[kHeads], block_sum[kHeads], values[kHeads][8];

  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      maximum[h] = -infinity();
      sum[h] = block_sum[h] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) values[h][i] = 0.0f;
    }
  }
  __device__ __forceinline__ void rescale(int h, float to) {
    const float factor = maximum[h] > -infinity() ? __expf(maximum[h] - to) : 0.0f;
    maximum[h] = to;
    sum[h] *= factor;
    block_sum[h] *= factor;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[h][i] *= factor;
  }
};

template <class T>
__device__ __forceinline__ void unpack(const Eight<T>& from, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = widen(from.at[i]);
}

// The query heads of one block of threads: kHeads at most, `count` of them there.
struct Heads {
  int first, count;
};

template <class T, int kHeads, int kParts>
struct Warp {
  static constexpr int kSideBySide = kWarp / kParts, kSteps = kBlockTokens / kSideBySide;
  // Keys and values on their way at once: what registers hold.
  static constexpr int kLoaded = (kHeads > 4 || kSteps < 4 ? 2 : 4) / (sizeof(T) == 4 ? 2 : 1);
  float query[kHeads][8];
  Stream<kHeads> stream;
  int part, token;  // which 8 dimensions, which of the tokens side by side
  bool has_dims;

  __device__ void start(const EtserveDecode& a, int seq, Heads heads) {
    part = static_cast<int>(threadIdx.x) % kParts;
    token = static_cast<int>(threadIdx.x) % kWarp / kParts;
    has_dims = part * 8 < a.head_dim;
    stream.clear();
    const T* q = static_cast<const T*>(a.q) + (static_cast<int64_t>(seq) * a.num_heads + heads.first) * a.head_dim;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        query[h][i] = has_dims && h < heads.count ? widen(q[h * a.head_dim + part * 8 + i]) * a.scale : 0.0f;
    }
  }

  // One KV block, whose first token stands at `position`; `keys` are those of the KV head.
  __device__ void attend(const EtserveDecode& a, const T* keys, int position, Span span) {
    const T* values = keys + static_cast<int64_t>(a.num_kv_heads) * kBlockTokens * a.head_dim;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) stream.block_sum[h] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < kSteps; first += kLoaded) {
      Eight<T> key[kLoaded] = {}, value[kLoaded] = {};
#pragma unroll
      for (int s = 0; s < kLoaded; ++s) {
        const int t = (first + s) * kSideBySide + token;
        if (!has_dims || position + t < span.begin || position + t >= span.end) continue;
        key[s] = *reinterpret_cast<const Eight<T>*>(keys + t * a.head_dim + part * 8);
        value[s] = *reinterpret_cast<const Eight<T>*>(values + t * a.head_dim + part * 8);
      }
      float weight[kLoaded][kHeads];
#pragma unroll
      for (int s = 0; s < kLoaded; ++s) {
        const int at = position + (first + s) * kSideBySide + token;
        score(key[s], at >= span.begin && at < span.end, weight[s]);
      }
      weigh(weight);
#pragma unroll
      for (int s = 0; s < kLoaded; ++s) add(value[s], weight[s]);
    }
  }

  __device__ __forceinline__ void score(const Eight<T>& key, bool is_visible, float (&scores)[kHeads]) const {
    float k[8];
    unpack(key, k);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += query[h][i] * k[i];
#pragma unroll
      for (int other = kParts / 2; other > 0; other /= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
      scores[h] = is_visible ? sum : -infinity();
    }
  }

  // Turns scores into weights relative to the stream's maximum, which they may raise.
  __device__ __forceinline__ void weigh(float (&scores)[kLoaded][kHeads]) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float top = scores[0][h];
#pragma unroll
      for (int s = 1; s < kLoaded; ++s) top = fmaxf(top, scores[s][h]);
      if (top > stream.maximum[h]) stream.rescale(h, top);
#pragma unroll
      for (int s = 0; s < kLoaded; ++s) {
        const bool is_seen = scores[s][h] > -infinity();
        scores[s][h] = is_seen ? __expf(scores[s][h] - stream.maximum[h]) : 0.0f;
        stream.sum[h] += scores[s][h];
        stream.block_sum[h] += scores[s][h];
      }
    }
  }

  __device__ __forceinline__ void add(const Eight<T>& value, const float (&weights)[kHeads]) {
    float v[8];
    unpack(value, v);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < 8; ++i) stream.values[h][i] += weights[h] * v[i];
    }
  }

  // Brings the streams of all tokens side by side into one, which every lane of a part then holds.
  __device__ void merge_streams() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float top = maximum_of_all(stream.maximum[h]);
      stream.rescale(h, top);
#pragma unroll
      for (int other = kParts; other < kWarp; other *= 2) {
        stream.sum[h] += __shfl_xor_sync(kAllLanes, stream.sum[h], other);
#pragma unroll
        for (int i = 0; i < 8; ++i) stream.values[h][i] += __shfl_xor_sync(kAllLanes, stream.values[h][i], other);
      }
    }
  }

  __device__ __forceinline__ float maximum_of_all(float mine) const {
#pragma unroll
    for (int other = kParts; other < kWarp; other *= 2) mine = fmaxf(mine, __shfl_xor_sync(kAllLanes, mine, other));
    return mine;
  }

  // Log of the sum of e^score over the block just attended to, for each head.
  __device__ void note_block(float* log_sums, int64_t stride, Heads heads) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float top = maximum_of_all(stream.maximum[h]);
      float sum = stream.maximum[h] > -infinity() ? stream.block_sum[h] * __expf(stream.maximum[h] - top) : 0.0f;
#pragma unroll
      for (int other = kParts; other < kWarp; other *= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
      if (h < heads.count && threadIdx.x % kWarp == 0) log_sums[h * stride] = top + logf(sum);
    }
  }
};

}  // namespace
}  // namespace etserve::cuda
