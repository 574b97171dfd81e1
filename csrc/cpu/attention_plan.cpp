#include "attention_plan.h"

namespace etserve::cpu {

int64_t attention_scratch_floats(int64_t num_tokens, int num_seqs, int max_context, int num_heads, int head_dim,
                                 int team_size) {
  const AttentionScratch scratch(num_seqs, max_context, num_heads, head_dim);
  return scratch.total(num_tokens, num_seqs, max_context, num_heads, team_size);
}

}  // namespace etserve::cpu
