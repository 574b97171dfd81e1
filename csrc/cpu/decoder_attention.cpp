// The decoder's attention: KV write, sketches of the blocks that fill, selection, and what they counted.
#include <algorithm>
#include <stdexcept>

#include "decoder.h"
#include "kv_layout.h"

namespace etserve::cpu {
namespace {

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

}  // namespace

void Decoder::check_selection(const Step& step) const {
  require(!step.sketches || step.sketch_bits == 1 || step.sketch_bits == 2, "sketches have 1 or 2 bits");
  if (!step.selection) return;
  require(step.sketches || step.selection->rule.selector != Selector::sketch, "nothing can be skipped without sketches");
  require(shape_.window == 0, "nothing can be skipped in a sliding window");
  require(step.selection->rule.recent_blocks >= 1, "the last block is always read");
}

void Decoder::reserve_selection(const Step& step, int32_t longest, int team_size) {
  const int seqs = static_cast<int>(step.num_seqs);
  filled_.clear();
  if (step.sketches)
    for (int64_t b = 0; b < step.num_seqs; ++b) {
      const int32_t end = step.context_lens[b], begin = end - (step.query_start[b + 1] - step.query_start[b]);
      for (int32_t i = begin / kBlockSize; i < end / kBlockSize; ++i)
        filled_.push_back(step.block_tables[b * step.max_blocks + i]);
    }
  if (step.block_mass) block_mass_.reserve(step.num_seqs * shape_.num_heads * step.max_blocks * 4);
  if (!step.selection) return;
  num_kept_.reserve(step.num_seqs * shape_.num_kv_heads * 4);
  missing_.reserve(step.num_seqs * shape_.num_kv_heads * 4);
  selection_scratch_.reserve(
      4 * selection_scratch_floats(seqs, longest, shape_.num_heads, shape_.num_kv_heads, team_size));
}

// q, k and v side by side. Matrices of several formats come one after the other: they share the rounded rows' memory.
void Decoder::project(const LayerWeights& layer, int64_t tokens, Team& team) const {
  const int64_t width = attention_size() + int64_t{2} * shape_.num_kv_heads * shape_.head_dim;
  int64_t column = 0;
  for (const PackedMatrix& m : layer.qkv) {
    if (column > 0) team.barrier();
    multiply({normed_.as<void>(), tokens, hidden_stride_, m, Epilogue::store, qkv_.as<float>() + column, width}, team);
    column += m.n;
  }
}

// From the residual stream to the heads' outputs (attended_), with the KV write on the way.
void Decoder::attend(int layer, const Step& step, bool wants_output, Team& team) {
  const DecoderShape& s = shape_;
  const LayerWeights& weights = layers_[static_cast<size_t>(layer)];
  const int64_t tokens = step.num_tokens, blocks = layer * step.num_blocks;
  char* kv = static_cast<char*>(step.kv) +
             blocks * 2 * s.num_kv_heads * kv_head_bytes(s.head_dim, s.kv_type);
  char* sketches = static_cast<char*>(step.sketches);
  if (sketches) sketches += blocks * s.num_kv_heads * sketch_bytes(s.head_dim, step.sketch_bits);
  norm(residual_.as<float>(), weights.input_norm, tokens, team);
  project(weights, tokens, team);
  team.barrier();
  mark(Phase::matrices, team);
  decoder_kernels().rope_and_write({qkv_.as<float>(), tokens, s.num_heads, s.num_kv_heads, s.head_dim, s.rotary_dim,
                                    cos_, sin_, step.positions, slots_.as<int64_t>(), weights.q_norm, weights.k_norm,
                                    s.eps, q_.as<float>(), kv, s.kv_type},
                                   team);
  team.barrier();
  if (!filled_.empty()) write_sketches(step, kv, sketches, team);
  mark(Phase::kv_write, team);
  if (!wants_output) return;
  call_attention(layer, step, kv, sketches, team);
  mark(Phase::attention, team);
}

void Decoder::write_sketches(const Step& step, const char* kv, char* sketches, Team& team) const {
  kernels().write_sketches({kv, shape_.kv_type, sketches, step.sketch_bits, step.signs, filled_.data(),
                            static_cast<int64_t>(filled_.size()), shape_.num_kv_heads, shape_.head_dim},
                           team);
  team.barrier();
}

SelectionArgs Decoder::selection_args(int layer, const Step& step, const char* sketches) const {
  SelectionArgs args{};
  args.rule = step.selection->rule;
  args.rule.seed += static_cast<uint64_t>(layer) * 0x9e3779b97f4a7c15u;
  args.sketches = sketches;
  args.bits = sketches ? step.sketch_bits : 2;
  args.signs = step.signs;
  args.epsilon = step.selection->epsilon;
  args.is_protected = step.selection->is_protected;
  args.num_kept = num_kept_.as<int32_t>();
  args.missing = missing_.as<float>();
  args.scratch = selection_scratch_.as<float>();
  return args;
}

void Decoder::call_attention(int layer, const Step& step, const char* kv, const char* sketches, Team& team) const {
  const DecoderShape& s = shape_;
  const bool selects = step.selection && layer >= step.selection->rule.dense_layers;
  SelectionArgs selection{};
  if (selects) selection = selection_args(layer, step, sketches);
  AttentionArgs args{};
  args.q = q_.as<float>();
  args.out = attended_.as<void>();
  args.out_type = head_.activation();
  args.kv = kv;
  args.kv_type = s.kv_type;
  args.num_seqs = static_cast<int>(step.num_seqs);
  args.query_start = step.query_start;
  args.context_lens = step.context_lens;
  args.block_tables = step.block_tables;
  args.max_blocks = static_cast<int>(step.max_blocks);
  args.num_heads = s.num_heads;
  args.num_kv_heads = s.num_kv_heads;
  args.head_dim = s.head_dim;
  args.scale = 1.0f / __builtin_sqrtf(static_cast<float>(s.head_dim));
  args.window = s.window;
  args.block_mass = step.block_mass ? block_mass_.as<float>() : nullptr;
  args.scratch = scratch_.as<float>();
  args.selection = selects ? &selection : nullptr;
  kernels().attention(args, team);
  team.barrier();
  if (step.selection) count_blocks(layer, step, selects, team);
  if (step.block_mass) merge_masses(layer, step, team);
}

// No barrier: the next layer's selection writes its counts behind several.
void Decoder::count_blocks(int layer, const Step& step, bool selects, Team& team) const {
  if (team.rank() != 0) return;
  const StepSelection& selection = *step.selection;
  const int num_layers = static_cast<int>(layers_.size()), heads = shape_.num_kv_heads;
  const int num_selecting = std::max(1, num_layers - selection.rule.dense_layers);
  for (int64_t b = 0; b < step.num_seqs; ++b) {
    if (layer == 0) selection.read_blocks[b] = 0, selection.missing[b] = 0.0f;
    const int64_t all = (step.context_lens[b] + kBlockSize - 1) / kBlockSize;
    if (!selects) selection.read_blocks[b] += all * heads;
    for (int64_t h = b * heads; selects && h < (b + 1) * heads; ++h) {
      selection.read_blocks[b] += num_kept_.as<int32_t>()[h];
      selection.missing[b] += missing_.as<float>()[h] / static_cast<float>(num_selecting * heads);
    }
  }
}

// No barrier, for the same reason.
void Decoder::merge_masses(int layer, const Step& step, Team& team) const {
  int64_t begin, end;
  team.split(step.num_seqs, 1, &begin, &end);
  for (int64_t b = begin; b < end; ++b) {
    float* largest = step.block_mass + b * step.max_blocks;
    if (layer == 0) std::fill_n(largest, step.max_blocks, 0.0f);
    for (int h = 0; h < shape_.num_heads; ++h) {
      const float* mass = block_mass_.as<float>() + (b * shape_.num_heads + h) * step.max_blocks;
      for (int64_t i = 0; i < step.max_blocks; ++i) largest[i] = std::max(largest[i], mass[i]);
    }
  }
}

}  // namespace etserve::cpu
