// A whole decoder-only transformer step in one call: every layer runs inside one Pool::run, member by member in step.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "dispatch.h"
#include "phase_clock.h"

namespace etserve::cpu {

struct LayerWeights {
  std::vector<PackedMatrix> qkv;  // rows of q, then k, then v: one matrix, or several of different formats
  PackedMatrix o;
  PackedMatrix gate_up;  // paired
  PackedMatrix down;
  const float* input_norm;  // [hidden]
  const float* post_norm;   // [hidden]
  const float* q_norm;      // null, or [head_dim]
  const float* k_norm;
};

struct DecoderShape {
  int hidden, intermediate, num_heads, num_kv_heads, head_dim, rotary_dim, vocab, max_position, window;
  float eps;
  DType kv_type;
};

// Which blocks the step's decode rows read; null pointers where a count is not wanted. Sums over layers and KV heads.
struct StepSelection {
  SelectionRule rule;
  const float* epsilon;         // [num_seqs]
  const uint8_t* is_protected;  // null, or [num_seqs][max_blocks]
  int64_t* read_blocks;         // [num_seqs]
  float* missing;               // [num_seqs]: mean over KV heads and the layers that may skip
};

// Pointers into the caller's arrays; the meaning is that of StepBatch (etserve/attention/batch.py).
struct Step {
  const int32_t* token_ids;     // [num_tokens]
  const int32_t* positions;     // [num_tokens]
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* block_tables;  // [num_seqs][max_blocks]
  const int32_t* logit_rows;    // [num_rows], ascending
  int64_t num_tokens, num_seqs, max_blocks, num_rows;
  void* kv;  // [layer][num_blocks][2][num_kv_heads][16 * head_dim]
  int64_t num_blocks;
  void* sketches;  // null: none are kept; or [layer][num_blocks][num_kv_heads][sketch_bytes(head_dim, sketch_bits)]
  int sketch_bits;
  const float* signs;              // [head_dim]
  const StepSelection* selection;  // null: everything is read
  float* block_mass;  // null, or [num_seqs][max_blocks]: largest exact softmax mass over layers and heads, of last rows
};

// Memory that grows, aligned to cache lines. New memory is zero: the padding of rows relies on it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  void reserve(int64_t num_bytes);
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// One call at a time: the scratch memory is the decoder's own.
class Decoder {
 public:
  // `embedding` is null (rows are read from the packed `table`, the head if that is null too) or row-major [vocab][hidden] of type `embedding_type`.
  // All memory behind the pointers stays the caller's and must outlive the decoder.
  Decoder(const DecoderShape& shape, std::vector<LayerWeights> layers, const float* final_norm,
          const PackedMatrix& head, const void* embedding, DType embedding_type, const float* cos, const float* sin,
          const PackedMatrix* table = nullptr);

  // Writes the step's KV entries and the final-normed hidden states of logit_rows, f32 [num_rows][hidden].
  // Throws std::invalid_argument, before anything is written, if the step points out of range.
  void forward(const Step& step, float* hidden);

  // hidden f32 [rows][hidden] -> out f32 [rows][vocab]
  void logits(const float* hidden, int64_t rows, float* out);

  PhaseClock clock;  // of all calls; read it between them

 private:
  // Behind a barrier: everybody is done with the phase.
  void mark(Phase phase, Team& team) {
    if (team.rank() == 0) clock.mark(phase);
  }
  void check(const Step& step) const;
  void reserve(const Step& step, int team_size);
  void embed(const Step& step, Team& team) const;
  void run_layers(const Step& step, float* hidden, Team& team);
  void attend(int layer, const Step& step, bool wants_output, Team& team);
  void write_sketches(const Step& step, const char* kv, char* sketches, Team& team) const;
  void call_attention(int layer, const Step& step, const char* kv, const char* sketches, Team& team) const;
  void count_blocks(int layer, const Step& step, bool selects, Team& team) const;
  void merge_masses(int layer, const Step& step, Team& team) const;
  void check_selection(const Step& step) const;
  void reserve_selection(const Step& step, int32_t longest, int team_size);
  SelectionArgs selection_args(int layer, const Step& step, const char* sketches) const;
  void project(const LayerWeights& layer, int64_t tokens, Team& team) const;
  void feed_forward(const LayerWeights& layer, float* residual, int64_t rows, Team& team);
  void reserve_quantised(int64_t rows, int team_size);
  void multiply(MatmulArgs args, Team& team) const;
  void norm(const float* x, const float* weight, int64_t rows, Team& team);
  int64_t attention_size() const { return int64_t{shape_.num_heads} * shape_.head_dim; }
  int64_t activation_bytes() const { return head_.activation() == DType::bf16 ? 2 : 4; }

  DecoderShape shape_;
  std::vector<LayerWeights> layers_;
  const float* final_norm_;
  PackedMatrix head_, table_;
  bool is_quantised_;  // any of the matrices
  const void* embedding_;
  DType embedding_type_;
  const float* cos_;
  const float* sin_;
  int64_t hidden_stride_, mlp_stride_;  // of activation rows, in elements
  Buffer residual_, normed_, qkv_, q_, attended_, mlp_, slots_, scratch_;
  Buffer row_residual_, row_attended_;  // the rows whose logits are wanted, in the last layer
  Buffer rounded_, quantised_;
  Buffer selection_scratch_, num_kept_, missing_, block_mass_;
  std::vector<int32_t> filled_;  // blocks whose last token is this step's: their sketches are due
};

}  // namespace etserve::cpu
