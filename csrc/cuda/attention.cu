// Attention of one query row per sequence over its paged context, split over partitions of 512 positions.
//
// A block of threads takes one partition, one KV head and up to 8 of its query heads; its warps take the partition's KV
// blocks in turn. In a warp, kParts lanes of 8 dimensions each hold a token, so 32 / kParts tokens lie side by side, each
// of which keeps a softmax of its own (maximum, sum, weighted values); they merge at the end, then the warps, then,
// in a second kernel, the partitions. On the way every KV block's log of summed weights is noted: minus the final
// log-sum-exp it is the block's exact mass. The order of every sum follows from the context alone.
#include "attention_warp.h"

namespace etserve::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPartitionBlocks = 32;
constexpr int kMergeThreads = 128;

struct Partials {
  float* maximum;  // [num_seqs][num_heads][partitions]
  float* sum;      // likewise
  float* values;   // [num_seqs][num_heads][partitions][head_dim], not yet divided
  int32_t partitions;
};

// Merges the warps of a partition and writes what the second kernel needs.
template <class T, int kHeads, int kParts>
__device__ void store_partition(const EtserveDecode& a, const Partials& partials, const Warp<T, kHeads, kParts>& mine,
                                int seq, Heads heads) {
  constexpr int kDims = kParts * 8;
  ETSERVE_SHARED(float, maxima, kWarps * kHeads);
  ETSERVE_SHARED(float, sums, kWarps * kHeads);
  ETSERVE_SHARED(float, values, kWarps * kHeads * kDims);
  const int warp = threadIdx.x / kWarp;
  if (mine.token == 0) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int at = warp * kHeads + h;
      if (mine.part == 0) maxima[at] = mine.stream.maximum[h], sums[at] = mine.stream.sum[h];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[at * kDims + mine.part * 8 + i] = mine.stream.values[h][i];
    }
  }
  __syncthreads();
  for (int h = 0; h < heads.count; ++h) {
    float top = maxima[h], sum = 0.0f, factor[kWarps];
    for (int w = 1; w < kWarps; ++w) top = fmaxf(top, maxima[w * kHeads + h]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float own = maxima[w * kHeads + h];
      factor[w] = own > -infinity() ? __expf(own - top) : 0.0f;
      sum += factor[w] * sums[w * kHeads + h];
    }
    const int64_t row = static_cast<int64_t>(seq) * a.num_heads + heads.first + h;
    const int64_t at = row * partials.partitions + blockIdx.x;
    if (threadIdx.x == 0) partials.maximum[at] = top, partials.sum[at] = sum;
    for (int d = threadIdx.x; d < a.head_dim; d += kThreads) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += factor[w] * values[(w * kHeads + h) * kDims + d];
      partials.values[at * a.head_dim + d] = total;
    }
  }
}

template <class T, int kHeads, int kParts>
__global__ void __launch_bounds__(kThreads) attend_partition(EtserveDecode a, Partials partials) {
  const int group = a.num_heads / a.num_kv_heads, pieces = (group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / pieces, piece = blockIdx.y % pieces, seq = blockIdx.z;
  const int left = group - piece * kHeads;
  const Heads heads{kv_head * group + piece * kHeads, left < kHeads ? left : kHeads};
  const Span span = visible(a, seq);
  const Reads reads = reads_of(a, seq, kv_head);
  const int first = blockIdx.x * kPartitionBlocks;
  const int end = first + kPartitionBlocks < reads.count ? first + kPartitionBlocks : reads.count;
  if (first >= end) return;
  Warp<T, kHeads, kParts> warp;
  warp.start(a, seq, heads);
  for (int i = first + threadIdx.x / kWarp; i < end; i += kWarps) {
    const int block = reads.list == nullptr ? i : reads.list[i];
    if ((block + 1) * kBlockTokens <= span.begin) continue;
    const int64_t at = a.block_tables[static_cast<int64_t>(seq) * a.max_blocks + block];
    const T* keys = static_cast<const T*>(a.kv) + (at * 2 * a.num_kv_heads + kv_head) * kBlockTokens * a.head_dim;
    warp.attend(a, keys, block * kBlockTokens, span);
    const int64_t row = static_cast<int64_t>(seq) * a.num_heads + heads.first;
    if (a.block_mass != nullptr) warp.note_block(a.block_mass + row * a.max_blocks + block, a.max_blocks, heads);
  }
  warp.merge_streams();
  store_partition(a, partials, warp, seq, heads);
}

template <class T>
__global__ void __launch_bounds__(kMergeThreads, 8) merge_partitions(EtserveDecode a, Partials partials) {
  const int64_t row = blockIdx.x;
  const int seq = static_cast<int>(row / a.num_heads), head = static_cast<int>(row % a.num_heads);
  const Span span = visible(a, seq);
  const Reads reads = reads_of(a, seq, head / (a.num_heads / a.num_kv_heads));
  const int n = (reads.count + kPartitionBlocks - 1) / kPartitionBlocks;
  const float* maxima = partials.maximum + row * partials.partitions;
  const float* sums = partials.sum + row * partials.partitions;
  const float* values = partials.values + row * partials.partitions * a.head_dim;
  float top = -infinity(), sum = 0.0f;
  for (int p = 0; p < n; ++p) top = fmaxf(top, maxima[p]);
  for (int p = 0; p < n; ++p) sum += maxima[p] > -infinity() ? sums[p] * expf(maxima[p] - top) : 0.0f;
  T* out = static_cast<T*>(a.out) + row * a.head_dim;
  for (int d = threadIdx.x; d < a.head_dim; d += kMergeThreads) {
    float total = 0.0f;
    for (int p = 0; p < n; ++p)
      if (maxima[p] > -infinity()) total += values[p * a.head_dim + d] * expf(maxima[p] - top);
    narrow(n > 0 ? total / sum : 0.0f, out[d]);
  }
  const float log_sum_exp = top + logf(sum);
  if (threadIdx.x == 0 && a.log_sum_exp != nullptr) a.log_sum_exp[row] = n > 0 ? log_sum_exp : -infinity();
  if (a.block_mass == nullptr) return;
  float* masses = a.block_mass + row * a.max_blocks;
  if (reads.list == nullptr) {
    for (int b = threadIdx.x; b < a.max_blocks; b += kMergeThreads) {
      const bool is_read = b < reads.count && (b + 1) * kBlockTokens > span.begin;
      masses[b] = is_read ? expf(masses[b] - log_sum_exp) : 0.0f;
    }
    return;
  }
  // The lists ascend: between two neighbours, and behind the last, lies what was not read.
  for (int i = threadIdx.x; i <= reads.count; i += kMergeThreads) {
    const int to = i < reads.count ? reads.list[i] : a.max_blocks;
#pragma unroll 1
    for (int b = i == 0 ? 0 : reads.list[i - 1] + 1; b < to; ++b) masses[b] = 0.0f;
    if (i < reads.count) masses[to] = expf(masses[to] - log_sum_exp);
  }
}

template <class T, int kHeads, int kParts>
int start(const EtserveDecode& a, const Partials& partials, void* stream) {
  const int group = a.num_heads / a.num_kv_heads, pieces = (group + kHeads - 1) / kHeads;
  const dim3 grid(static_cast<unsigned>(partials.partitions), static_cast<unsigned>(a.num_kv_heads * pieces),
                  static_cast<unsigned>(a.num_seqs));
  const int code = launch(attend_partition<T, kHeads, kParts>, grid, kThreads, stream, a, partials);
  if (code != 0) return code;
  const dim3 rows(static_cast<unsigned>(a.num_seqs * a.num_heads));
  return launch(merge_partitions<T>, rows, kMergeThreads, stream, a, partials);
}

// A group of fewer heads leaves some idle: what is read is the same, and reading is what takes the time.
template <class T, int kParts>
int with_heads(const EtserveDecode& a, const Partials& partials, void* stream) {
  const int group = a.num_heads / a.num_kv_heads;
  if (group <= 4) return start<T, 4, kParts>(a, partials, stream);
  return start<T, 8, kParts>(a, partials, stream);
}

template <class T>
int with_parts(const EtserveDecode& a, const Partials& partials, void* stream) {
  if (a.head_dim <= 32) return with_heads<T, 4>(a, partials, stream);
  if (a.head_dim <= 64) return with_heads<T, 8>(a, partials, stream);
  if (a.head_dim <= 128) return with_heads<T, 16>(a, partials, stream);
  return with_heads<T, 32>(a, partials, stream);
}

int32_t num_partitions(int32_t max_blocks) { return (max_blocks + kPartitionBlocks - 1) / kPartitionBlocks; }

}  // namespace
}  // namespace etserve::cuda

using namespace etserve::cuda;

extern "C" int64_t etserve_cuda_decode_scratch_bytes(int32_t num_seqs, int32_t max_blocks, int32_t num_heads,
                                                     int32_t head_dim) {
  const int64_t rows = static_cast<int64_t>(num_seqs) * num_heads * num_partitions(max_blocks);
  return rows * (head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

extern "C" int etserve_cuda_decode_attention(const EtserveDecode* args, void* stream) {
  const EtserveDecode& a = *args;
  if (a.head_dim < 8 || a.head_dim > 256 || a.head_dim % 8 != 0 || a.num_seqs < 0 || a.num_seqs > 65535) return kInvalidValue;
  if (a.num_kv_heads < 1 || a.num_heads % a.num_kv_heads != 0 || a.num_heads > 65535 || a.max_blocks < 1) return kInvalidValue;
  if ((a.kept == nullptr) != (a.num_kept == nullptr) || (a.kept != nullptr && a.window > 0)) return kInvalidValue;
  if (a.num_seqs == 0) return 0;
  const int32_t partitions = num_partitions(a.max_blocks);
  const int64_t rows = static_cast<int64_t>(a.num_seqs) * a.num_heads * partitions;
  float* scratch = static_cast<float*>(a.scratch);
  const Partials partials{scratch + rows * a.head_dim, scratch + rows * (a.head_dim + 1), scratch, partitions};
  return with_type(a.dtype, [&](auto element) { return with_parts<decltype(element)>(a, partials, stream); });
}
