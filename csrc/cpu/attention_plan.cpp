#include "attention_plan.h"

#include "sketch_plan.h"

namespace etserve::cpu {

int64_t attention_scratch_floats(int64_t num_tokens, int num_seqs, int max_context, int num_heads, int head_dim,
                                 int team_size) {
  const AttentionScratch scratch(num_seqs, max_context, num_heads, head_dim);
  return scratch.total(num_tokens, num_seqs, max_context, num_heads, team_size);
}

int64_t sketch_bytes(int head_dim, int bits) { return SketchLayout(head_dim, bits).num_bytes; }

int64_t selection_scratch_floats(int num_seqs, int max_context, int num_heads, int num_kv_heads, int team_size) {
  return SelectionScratch(num_seqs, max_context, num_heads, num_kv_heads).total(team_size);
}

}  // namespace etserve::cpu
