// Fused block eviction: score update, selection under the guards, compaction. The law: etserve/control/eviction.py.
//
// One block of threads per sequence. Scores are double, from the same f32 averages that the law is given, so that equal
// inputs choose equal blocks. What a sequence gives back joins the free list in the order of sequences.
#include "device.h"

namespace etserve::cuda {
namespace {

constexpr int kThreads = 256;

__device__ bool is_nan(float x) { return x != x; }

// The largest mass over the heads of one layer into that of the step so far; unknown stays unknown.
__global__ void __launch_bounds__(kThreads) fold(EtserveFoldMass a) {
  const int seq = blockIdx.y, block = blockIdx.x * kThreads + threadIdx.x;
  if (block >= a.max_blocks) return;
  float* step = a.step_mass + static_cast<int64_t>(seq) * a.max_blocks + block;
  float top = *step;
  for (int h = 0; h < a.num_heads; ++h) {
    const float mass = a.block_mass[(static_cast<int64_t>(seq) * a.num_heads + h) * a.max_blocks + block];
    if (!is_nan(top) && !(mass <= top)) top = mass;
  }
  *step = top;
}

// What is kept of one held block.
struct Block {
  int32_t id, index;
  float weighted, weight, surprisal;
  uint8_t is_protected;
};

struct Sequence {
  const EtserveEvict& a;
  int64_t first;  // of the sequence's row in [num_seqs][max_blocks] arrays
  int held, length;

  __device__ Block load(int i) const {
    const int64_t at = first + i;
    return {a.block_tables[at], a.block_index[at], a.mass_weighted[at],
            a.mass_weight[at],  a.surprisal[at],   a.is_protected[at]};
  }
  __device__ void store(int i, const Block& block) const {
    const int64_t at = first + i;
    a.block_tables[at] = block.id;
    a.block_index[at] = block.index;
    a.mass_weighted[at] = block.weighted;
    a.mass_weight[at] = block.weight;
    a.surprisal[at] = block.surprisal;
    a.is_protected[at] = block.is_protected;
  }
  __device__ void observe(int i) const {
    const int64_t at = first + i;
    const float mass = a.step_mass[at], fresh = 1.0f - a.mass_decay;
    a.step_mass[at] = 0.0f;
    if (is_nan(mass) || !(mass < infinity())) return;
    a.mass_weighted[at] = a.mass_decay * a.mass_weighted[at] + fresh * mass;
    a.mass_weight[at] = a.mass_decay * a.mass_weight[at] + fresh;
  }
  // Infinite where a guard holds the block, or nobody knows its score.
  __device__ double score(int i) const {
    const Block block = load(i);
    const bool is_inside = block.index >= a.sink_blocks && block.index < length - a.recent_blocks;
    const bool is_ours_alone = a.num_refs[block.id] == 1 && a.is_cached[block.id] == 0;
    if (!is_inside || !is_ours_alone || block.is_protected != 0 || !(block.weight > 0.0f)) return infinity();
    const double score = static_cast<double>(block.weighted) / block.weight * block.surprisal;
    return score - score == 0.0 ? score : static_cast<double>(infinity());
  }
  __device__ int allowed(int wanted) const {
    const int share = static_cast<int>(ceil(a.min_kept_share * length));
    const int spare = held - (share > a.min_kept_blocks ? share : a.min_kept_blocks);
    const int least = wanted < spare ? wanted : spare;
    return least > 0 ? least : 0;
  }
  // Position in the order of eviction: lowest score first, the older of equals.
  __device__ int rank(const double* scores, int i, int limit) const {
    const double mine = scores[i];
    if (!(mine < infinity())) return limit;
    const int32_t index = a.block_index[first + i];
    int before = 0;
    for (int j = 0; j < held && before < limit; ++j)
      before += scores[j] < mine || (scores[j] == mine && a.block_index[first + j] < index) ? 1 : 0;
    return before;
  }
};

__global__ void __launch_bounds__(kThreads) evict(EtserveEvict a) {
  const int seq = blockIdx.x;
  const Sequence s{a, static_cast<int64_t>(seq) * a.max_blocks, a.num_held[seq], a.num_sequence_blocks[seq]};
  double* scores = a.scratch + s.first;
  for (int i = threadIdx.x; i < s.held; i += kThreads) s.observe(i);
  const int limit = s.allowed(a.num_wanted[seq]);
  if (limit == 0) {
    if (threadIdx.x == 0) a.num_evicted[seq] = 0;
    return;
  }
  for (int i = threadIdx.x; i < s.held; i += kThreads) scores[i] = s.score(i);
  __syncthreads();
  // Ranks first: they compare indices of all blocks, which compaction moves.
  for (int i = threadIdx.x; i < s.held; i += kThreads) {
    const int rank = s.rank(scores, i, limit);
    a.ranks[s.first + i] = rank;
    if (rank < limit) a.evicted[s.first + rank] = a.block_tables[s.first + i];
  }
  __syncthreads();
  int kept = 0;
  for (int tile = 0; tile < s.held; tile += kThreads) {
    const int i = tile + static_cast<int>(threadIdx.x);
    const bool stays = i < s.held && a.ranks[s.first + i] >= limit;
    const Block block = stays ? s.load(i) : Block{};
    int total;
    const int place = kept + block_scan<kThreads>(stays ? 1 : 0, total) - 1;  // its barriers part all loads of the tile from the stores
    if (stays) s.store(place, block);
    kept += total;
  }
  __syncthreads();
  for (int i = kept + threadIdx.x; i < s.held; i += kThreads) s.store(i, Block{});
  if (threadIdx.x == 0) a.num_held[seq] = kept, a.num_evicted[seq] = s.held - kept;
}

__global__ void __launch_bounds__(kThreads) append_to_free_list(EtserveEvict a) {
  int count = *a.num_free;
  __syncthreads();
  for (int seq = 0; seq < a.num_seqs; ++seq) {
    const int n = a.num_evicted[seq];
    const int32_t* evicted = a.evicted + static_cast<int64_t>(seq) * a.max_blocks;
    for (int i = threadIdx.x; i < n; i += kThreads) a.free_list[count + i] = evicted[i];
    count += n;
  }
  if (threadIdx.x == 0) *a.num_free = count;
}

}  // namespace
}  // namespace etserve::cuda

using namespace etserve::cuda;

extern "C" int etserve_cuda_fold_mass(const EtserveFoldMass* args, void* stream) {
  if (args->num_seqs < 0 || args->num_seqs > 65535 || args->num_heads < 1 || args->max_blocks < 1) return kInvalidValue;
  if (args->num_seqs == 0) return 0;
  const dim3 grid(static_cast<unsigned>(ceil_div(args->max_blocks, kThreads)), static_cast<unsigned>(args->num_seqs));
  return launch(fold, grid, kThreads, stream, *args);
}

extern "C" int etserve_cuda_evict(const EtserveEvict* args, void* stream) {
  if (args->num_seqs < 0 || args->max_blocks < 1 || !(args->mass_decay >= 0.0f && args->mass_decay < 1.0f)) return kInvalidValue;
  if (args->num_seqs == 0) return 0;
  const int code = launch(evict, dim3(static_cast<unsigned>(args->num_seqs)), kThreads, stream, *args);
  return code != 0 ? code : launch(append_to_free_list, dim3(1), kThreads, stream, *args);
}
