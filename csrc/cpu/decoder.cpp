#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "convert.h"
#include "kv_layout.h"
#include "quant.h"

namespace etserve::cpu {
namespace {

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// Row strides are an odd number of cache lines: the dozen rows of a tile then fall into different cache sets.
int64_t activation_stride(int64_t size, int64_t element_bytes) {
  const int64_t lines = (size * element_bytes + 63) / 64;
  return (lines | 1) * 64 / element_bytes;
}

}  // namespace

void Buffer::reserve(int64_t num_bytes) {
  if (num_bytes <= size_) return;
  const int64_t size = round_up(num_bytes, 64);
  void* fresh = std::aligned_alloc(64, static_cast<size_t>(size));
  if (!fresh) throw std::bad_alloc();
  std::memset(fresh, 0, static_cast<size_t>(size));
  std::free(data_);
  data_ = fresh;
  size_ = size;
}

Decoder::Decoder(const DecoderShape& shape, std::vector<LayerWeights> layers, const float* final_norm,
                 const PackedMatrix& head, const void* embedding, DType embedding_type, const float* cos,
                 const float* sin, const PackedMatrix* table)
    : shape_(shape),
      layers_(std::move(layers)),
      final_norm_(final_norm),
      head_(head),
      table_(table ? *table : head),
      embedding_(embedding),
      embedding_type_(embedding_type),
      cos_(cos),
      sin_(sin) {
  const DecoderShape& s = shape_;
  require(!layers_.empty(), "a decoder needs a layer");
  require(s.head_dim % 2 == 0 && s.head_dim >= 16 && s.head_dim <= 256, "head_dim must be even, 16 .. 256");
  require(s.rotary_dim % 2 == 0 && s.rotary_dim >= 0 && s.rotary_dim <= s.head_dim,
          "rotary_dim must be even, at most head_dim");
  require(s.num_kv_heads > 0 && s.num_heads % s.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
  require(s.kv_type <= DType::f16 || s.kv_type == kI8, "the KV cache is f32, bf16, f16 or i8");
  require(s.kv_type != kI8 || s.head_dim % 4 == 0, "an i8 KV cache takes a head_dim that is a multiple of 4");
  require(head_.n == s.vocab && head_.k == s.hidden && !head_.paired, "the head has the wrong shape");
  require(table_.n == s.vocab && table_.k == s.hidden && !table_.paired, "the embedding has the wrong shape");
  is_quantised_ = is_quantised(head_.type);
  const int64_t attention = attention_size(), kv = int64_t{s.num_kv_heads} * s.head_dim;
  for (const LayerWeights& l : layers_) {
    std::vector<const PackedMatrix*> matrices{&l.o, &l.gate_up, &l.down};
    int64_t width = 0;
    for (const PackedMatrix& m : l.qkv) {
      require(m.k == s.hidden && !m.paired, "qkv has the wrong shape");
      width += m.n;
      matrices.push_back(&m);
    }
    require(width == attention + 2 * kv, "qkv has the wrong shape");
    require(l.o.n == s.hidden && l.o.k == attention && !l.o.paired, "o has the wrong shape");
    require(l.gate_up.n == s.intermediate && l.gate_up.k == s.hidden && l.gate_up.paired,
            "gate_up has the wrong shape");
    require(l.down.n == s.hidden && l.down.k == s.intermediate && !l.down.paired, "down has the wrong shape");
    for (const PackedMatrix* m : matrices) {
      require(m->activation() == head_.activation(), "all matrices take the same type of activation");
      is_quantised_ = is_quantised_ || is_quantised(m->type);
    }
  }
  hidden_stride_ = activation_stride(s.hidden, activation_bytes());
  mlp_stride_ = activation_stride(s.intermediate, activation_bytes());
}

void Decoder::check(const Step& step) const {
  require(step.num_tokens > 0 && step.num_seqs > 0, "an empty step");
  require(step.query_start[0] == 0 && step.query_start[step.num_seqs] == step.num_tokens,
          "query_start must run from 0 to the number of tokens");
  for (int64_t t = 0; t < step.num_tokens; ++t)
    require(step.token_ids[t] >= 0 && step.token_ids[t] < shape_.vocab, "a token id is out of the vocabulary");
  for (int64_t b = 0; b < step.num_seqs; ++b) {
    const int64_t count = int64_t{step.query_start[b + 1]} - step.query_start[b], context = step.context_lens[b];
    require(count > 0, "query_start must ascend");
    require(count <= context && context <= shape_.max_position, "a context length is out of range");
    const int64_t blocks = (context + kBlockSize - 1) / kBlockSize;
    require(blocks <= step.max_blocks, "a block table is too short");
    for (int64_t i = 0; i < blocks; ++i) {
      const int32_t block = step.block_tables[b * step.max_blocks + i];
      require(block >= 0 && block < step.num_blocks, "a block id is out of the pool");
    }
    // Evicted blocks are not in the table: positions then run ahead of what is kept, by whole blocks.
    const int64_t ahead = step.positions[step.query_start[b]] - (context - count);
    require(ahead >= 0 && ahead % kBlockSize == 0 && context + ahead <= shape_.max_position,
            "a position does not fit its context");
    for (int64_t i = 0; i < count; ++i)
      require(step.positions[step.query_start[b] + i] == ahead + context - count + i,
              "a position does not fit its context");
  }
  for (int64_t r = 0; r < step.num_rows; ++r)
    require(step.logit_rows[r] >= 0 && step.logit_rows[r] < step.num_tokens &&
                (r == 0 || step.logit_rows[r] > step.logit_rows[r - 1]),
            "logit_rows must ascend within the step");
  check_selection(step);
}

void Decoder::reserve(const Step& step, int team_size) {
  const DecoderShape& s = shape_;
  const int64_t tokens = step.num_tokens, rows = step.num_rows, bytes = activation_bytes();
  const int64_t qkv = attention_size() + int64_t{2} * s.num_kv_heads * s.head_dim;
  residual_.reserve(tokens * s.hidden * 4);
  normed_.reserve(tokens * hidden_stride_ * bytes);
  qkv_.reserve(tokens * qkv * 4);
  q_.reserve(tokens * attention_size() * 4);
  attended_.reserve(tokens * attention_size() * bytes);
  mlp_.reserve(tokens * mlp_stride_ * bytes);
  slots_.reserve(tokens * 8);
  row_residual_.reserve(rows * s.hidden * 4);
  row_attended_.reserve(rows * attention_size() * bytes);
  const int32_t context = *std::max_element(step.context_lens, step.context_lens + step.num_seqs);
  scratch_.reserve(4 * attention_scratch_floats(tokens, static_cast<int>(step.num_seqs), context, s.num_heads,
                                                s.head_dim, team_size));
  if (is_quantised_) reserve_quantised(tokens, team_size);
  reserve_selection(step, context, team_size);
  int64_t* slots = slots_.as<int64_t>();
  for (int64_t b = 0; b < step.num_seqs; ++b)
    for (int32_t t = step.query_start[b]; t < step.query_start[b + 1]; ++t) {
      const int32_t place = step.context_lens[b] - (step.query_start[b + 1] - t);
      const int64_t block = step.block_tables[b * step.max_blocks + place / kBlockSize];
      slots[t] = block * kBlockSize + place % kBlockSize;
    }
}

void Decoder::reserve_quantised(int64_t rows, int team_size) {
  const int64_t longest = std::max({int64_t{shape_.hidden}, int64_t{shape_.intermediate}, attention_size()});
  // Few rows are quantised by each member for itself: a later layer's or call's fewer rows may take more.
  quantised_.reserve(std::max(quant_scratch_bytes(rows, longest, team_size),
                              quant_scratch_bytes(std::min(rows, kMaxOwnRows), longest, team_size)));
}

void Decoder::forward(const Step& step, float* hidden) {
  clock.start();
  check(step);
  require(kernels().attention != nullptr, "the attention kernel is not built");
  Pool& pool = global_pool();
  reserve(step, pool.size());
  clock.mark(Phase::setup);
  pool.run([&](Team& team) { run_layers(step, hidden, team); });
  clock.mark(Phase::elementwise);
}

void Decoder::embed(const Step& step, Team& team) const {
  int64_t begin, end;
  team.split(step.num_tokens, 1, &begin, &end);
  for (int64_t t = begin; t < end; ++t) {
    float* out = residual_.as<float>() + t * shape_.hidden;
    const int64_t first = int64_t{step.token_ids[t]} * shape_.hidden;
    if (!embedding_) {
      unpack_row(table_, step.token_ids[t], out);
    } else if (embedding_type_ == DType::f32) {
      std::memcpy(out, static_cast<const float*>(embedding_) + first, static_cast<size_t>(shape_.hidden) * 4);
    } else {
      const uint16_t* row = static_cast<const uint16_t*>(embedding_) + first;
      const bool is_bf16 = embedding_type_ == DType::bf16;
      for (int i = 0; i < shape_.hidden; ++i) out[i] = is_bf16 ? from_bf16(row[i]) : from_f16(row[i]);
    }
  }
  team.barrier();
}

void Decoder::multiply(MatmulArgs args, Team& team) const {
  args.scratch = quantised_.as<void>();
  decoder_kernels().matmul(args, team);
}

void Decoder::norm(const float* x, const float* weight, int64_t rows, Team& team) {
  decoder_kernels().rms_norm({x, rows, shape_.hidden, shape_.hidden, weight, shape_.eps, normed_.as<void>(),
                              head_.activation(), hidden_stride_},
                             team);
  team.barrier();
  mark(Phase::elementwise, team);
}

void Decoder::feed_forward(const LayerWeights& layer, float* residual, int64_t rows, Team& team) {
  norm(residual, layer.post_norm, rows, team);
  multiply({normed_.as<void>(), rows, hidden_stride_, layer.gate_up, Epilogue::silu_mul, mlp_.as<void>(), mlp_stride_},
           team);
  team.barrier();
  multiply({mlp_.as<void>(), rows, mlp_stride_, layer.down, Epilogue::add, residual, shape_.hidden}, team);
  team.barrier();
  mark(Phase::matrices, team);
}

void Decoder::run_layers(const Step& step, float* hidden, Team& team) {
  const DecoderShape& s = shape_;
  embed(step, team);
  mark(Phase::setup, team);
  for (size_t i = 0; i + 1 < layers_.size(); ++i) {
    attend(static_cast<int>(i), step, true, team);
    multiply({attended_.as<void>(), step.num_tokens, attention_size(), layers_[i].o, Epilogue::add,
              residual_.as<void>(), s.hidden},
             team);
    team.barrier();
    mark(Phase::matrices, team);
    feed_forward(layers_[i], residual_.as<float>(), step.num_tokens, team);
  }
  // Behind the last KV write only the rows whose logits are wanted matter.
  const LayerWeights& last = layers_.back();
  attend(static_cast<int>(layers_.size()) - 1, step, step.num_rows > 0, team);
  const int64_t rows = step.num_rows, row_bytes = attention_size() * activation_bytes();
  if (rows == 0) return;
  int64_t begin, end;
  team.split(rows, 1, &begin, &end);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t t = step.logit_rows[r];
    std::memcpy(row_residual_.as<float>() + r * s.hidden, residual_.as<float>() + t * s.hidden,
                static_cast<size_t>(s.hidden) * 4);
    std::memcpy(row_attended_.as<char>() + r * row_bytes, attended_.as<char>() + t * row_bytes,
                static_cast<size_t>(row_bytes));
  }
  team.barrier();
  multiply({row_attended_.as<void>(), rows, attention_size(), last.o, Epilogue::add, row_residual_.as<void>(),
            s.hidden},
           team);
  team.barrier();
  mark(Phase::matrices, team);
  feed_forward(last, row_residual_.as<float>(), rows, team);
  decoder_kernels().rms_norm(
      {row_residual_.as<float>(), rows, s.hidden, s.hidden, final_norm_, s.eps, hidden, DType::f32, s.hidden}, team);
}

void Decoder::logits(const float* hidden, int64_t rows, float* out) {
  if (rows == 0) return;
  clock.start();
  MatmulArgs args{hidden, rows, shape_.hidden, head_, Epilogue::store, out, shape_.vocab};
  const bool rounds = head_.activation() == DType::bf16;
  if (rounds) {
    rounded_.reserve(rows * hidden_stride_ * 2);
    args.x = rounded_.as<void>();
    args.x_stride = hidden_stride_;
  }
  if (is_quantised_) reserve_quantised(rows, global_pool().size());
  global_pool().run([&](Team& team) {
    if (rounds) {
      decoder_kernels().round_rows({hidden, rows, shape_.hidden, rounded_.as<uint16_t>(), hidden_stride_}, team);
      team.barrier();
    }
    multiply(args, team);
  });
  clock.mark(Phase::head);
}

}  // namespace etserve::cpu
