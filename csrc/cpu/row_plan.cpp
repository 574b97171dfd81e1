#include "row_plan.h"

namespace etserve::cpu {

int64_t row_pass_scratch_bytes(int64_t rows, int64_t vocab, int /*k*/, int team_size) {
  const int64_t chunks = row_chunks(rows, vocab, team_size);
  return rows * (row_tiles(vocab) * static_cast<int64_t>(sizeof(RowPartial)) + chunks * static_cast<int64_t>(sizeof(TopList)));
}

int64_t sample_scratch_bytes(int64_t vocab, int team_size) {
  return 64 + team_size * SampleScratch(vocab).per_thread * static_cast<int64_t>(sizeof(float));
}

}  // namespace etserve::cpu
