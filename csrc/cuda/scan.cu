// Estimated log mass of every block for every query head, from the key sketches; then the choice (choose.h).
//
// Sixteen lanes hold the tokens of a block; eight blocks are scored side by side. Products of codes with the query, which
// is rotated and rounded to bytes, are whole numbers. A block that is not full yet is scored by its keys themselves.
#include "choose.h"

namespace etserve::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSideBySide = kThreads / kBlockTokens;
constexpr int kBlocksEach = 4;
constexpr int kScanBlocks = kSideBySide * kBlocksEach;  // of one block of threads

template <int kHeads>
struct Queries {
  float* plain;  // [kHeads][head_dim], `scale` taken in
  int* codes;    // [kHeads][kMaxSketchDim / 4], rotated, as signed bytes, padded with zeros
  float* units;  // [kHeads], of a code's level
};

// All threads call. Heads that are not there score 0.
template <class T, int kHeads>
__device__ void load_queries(const EtserveSelect& a, const T* q, int count, float* turned, const Queries<kHeads>& to) {
  const int dim = a.head_dim;
  for (int i = threadIdx.x; i < kHeads * dim; i += kThreads) {
    to.plain[i] = i / dim < count ? widen(q[i]) * a.scale : 0.0f;
    turned[i] = to.plain[i] * a.signs[i % dim];
  }
  hadamard(turned, kHeads, dim, kThreads);
  const float norm = 1.0f / sqrtf(static_cast<float>(hadamard_size(dim)));
  for (int h = threadIdx.x / kWarp; h < kHeads; h += kThreads / kWarp) {
    float top = 0.0f;
    for (int d = threadIdx.x % kWarp; d < dim; d += kWarp) top = fmaxf(top, fabsf(turned[h * dim + d]));
    top = warp_max(top);
    const float factor = top > 0.0f && top < infinity() ? 127.0f / top : 0.0f;
    if (threadIdx.x % kWarp == 0) to.units[h] = top / 127.0f * norm * (a.bits == 2 ? kLevelUnit2 : kLevelUnit1);
    for (int word = threadIdx.x % kWarp; word < kMaxSketchDim / 4; word += kWarp) {
      unsigned bytes = 0;
      for (int k = 0; k < 4 && word * 4 + k < dim; ++k)
        bytes |= (static_cast<unsigned>(__float2int_rn(turned[h * dim + word * 4 + k] * factor)) & 0xffu) << (8 * k);
      to.codes[h * (kMaxSketchDim / 4) + word] = static_cast<int>(bytes);
    }
  }
  __syncthreads();
}

template <int kHeads>
__device__ void score_by_sketch(const EtserveSelect& a, const SketchLayout& layout, int64_t at, int token,
                                const Queries<kHeads>& q, float (&scores)[kHeads]) {
  const unsigned char* from = static_cast<const unsigned char*>(a.sketches) + at * layout.num_bytes;
  const Bf16* mean = reinterpret_cast<const Bf16*>(from + layout.mean_at);
  const unsigned* words = reinterpret_cast<const unsigned*>(from + token * layout.token_bytes);
  const int fields = a.bits == 2 ? 4 : 8, width = 32 / fields;
  int dots[kHeads] = {};
  for (int w = 0; w < layout.token_bytes / 4; ++w) {
    const unsigned word = words[w];
    for (int k = 0; k < fields; ++k) {
      const int levels = static_cast<int>(levels_of(word >> (k * width) & ((1u << width) - 1u), a.bits));
#pragma unroll
      for (int h = 0; h < kHeads; ++h) dots[h] = __dp4a(levels, q.codes[h * (kMaxSketchDim / 4) + w * fields + k], dots[h]);
    }
  }
  const float scale = widen(reinterpret_cast<const Bf16*>(from + layout.scales_at)[token]);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float base = 0.0f;
    for (int d = token; d < a.head_dim; d += kBlockTokens) base += q.plain[h * a.head_dim + d] * widen(mean[d]);
#pragma unroll
    for (int other = kBlockTokens / 2; other > 0; other /= 2) base += __shfl_xor_sync(kAllLanes, base, other);
    scores[h] = static_cast<float>(dots[h]) * q.units[h] * scale + base;
  }
}

template <class T, int kHeads>
__device__ void score_by_keys(const EtserveSelect& a, int64_t block, int kv_head, int token, int valid,
                              const Queries<kHeads>& q, float (&scores)[kHeads]) {
  const T* key = static_cast<const T*>(a.kv) + ((block * 2 * a.num_kv_heads + kv_head) * kBlockTokens + token) * a.head_dim;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) scores[h] = token < valid ? 0.0f : -infinity();
  for (int d = 0; token < valid && d < a.head_dim; ++d) {
    const float x = widen(key[d]);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) scores[h] += q.plain[h * a.head_dim + d] * x;
  }
}

// Log of the sum over the block's sixteen lanes; NaN and infinity stay unknown.
__device__ float log_mass(float score) {
  float top = score;
#pragma unroll
  for (int other = kBlockTokens / 2; other > 0; other /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, other));
  float sum = expf(score - top);
#pragma unroll
  for (int other = kBlockTokens / 2; other > 0; other /= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
  return top + logf(sum);
}

template <class T, int kHeads>
__global__ void __launch_bounds__(kThreads) scan(EtserveSelect a) {
  ETSERVE_SHARED(float, plain, kHeads * kMaxSketchDim);
  ETSERVE_SHARED(float, turned, kHeads * kMaxSketchDim);
  ETSERVE_SHARED(int, codes, kHeads * kMaxSketchDim / 4);
  ETSERVE_SHARED(float, units, kHeads);
  const int seq = blockIdx.z, first = blockIdx.x * kScanBlocks, total = blocks_of(a, seq);
  if (!selects(a, seq) || first >= total) return;
  const int group = a.num_heads / a.num_kv_heads, pieces = (group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / pieces, offset = blockIdx.y % pieces * kHeads;
  const int count = group - offset < kHeads ? group - offset : kHeads;
  const int64_t row = static_cast<int64_t>(seq) * a.num_heads + kv_head * group + offset;
  const Queries<kHeads> queries{plain, codes, units};
  load_queries<T, kHeads>(a, static_cast<const T*>(a.q) + row * a.head_dim, count, turned, queries);
  const SketchLayout layout(a.head_dim, a.bits);
  const int token = threadIdx.x % kBlockTokens, full = a.context_lens[seq] / kBlockTokens;
  const int32_t* table = a.block_tables + static_cast<int64_t>(seq) * a.max_blocks;
  for (int i = 0; i < kBlocksEach; ++i) {
    const int own = first + i * kSideBySide + static_cast<int>(threadIdx.x) / kBlockTokens;
    const bool is_there = own < total;
    const int64_t block = table[is_there ? own : 0];
    float scores[kHeads];
    // Whole warps: a half without a full block scores what is then overwritten.
    score_by_sketch<kHeads>(a, layout, block * a.num_kv_heads + kv_head, token, queries, scores);
    if (is_there && own >= full)
      score_by_keys<T, kHeads>(a, block, kv_head, token, a.context_lens[seq] - own * kBlockTokens, queries, scores);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float mass = log_mass(scores[h]);
      if (is_there && h < count && token == 0) a.log_mass[(row + h) * a.max_blocks + own] = mass;
    }
  }
}

template <class T, int kHeads>
int start(const EtserveSelect& a, void* stream) {
  const int group = a.num_heads / a.num_kv_heads, pieces = (group + kHeads - 1) / kHeads;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.max_blocks, kScanBlocks)),
                  static_cast<unsigned>(a.num_kv_heads * pieces), static_cast<unsigned>(a.num_seqs));
  return launch(scan<T, kHeads>, grid, kThreads, stream, a);
}

}  // namespace
}  // namespace etserve::cuda

using namespace etserve::cuda;

extern "C" int etserve_cuda_select(const EtserveSelect* args, void* stream) {
  const EtserveSelect& a = *args;
  const bool is_valid = a.head_dim >= 8 && a.head_dim <= kMaxSketchDim && a.head_dim % 8 == 0 && a.num_kv_heads >= 1 &&
                        a.num_heads % a.num_kv_heads == 0 && a.num_heads <= 65535 && (a.bits == 1 || a.bits == 2) &&
                        a.max_blocks >= 1 && a.recent_blocks >= 1 && a.selector >= 0 && a.selector <= 2;
  if (!is_valid || a.num_seqs < 0 || a.num_seqs > 65535) return kInvalidValue;
  if (a.num_seqs == 0) return 0;
  if (a.selector == kBySketch) {
    const int code = with_type(a.dtype, [&](auto element) {
      using T = decltype(element);
      return a.num_heads / a.num_kv_heads <= 4 ? start<T, 4>(a, stream) : start<T, 8>(a, stream);
    });
    if (code != 0) return code;
  }
  const dim3 grid(static_cast<unsigned>(a.num_kv_heads), static_cast<unsigned>(a.num_seqs));
  return launch(choose, grid, kChooseThreads, stream, a);
}
