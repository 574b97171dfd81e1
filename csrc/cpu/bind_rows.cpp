// Bindings of paged attention, the row pass and the sampler: addresses in, checked in etserve/kernels/{attention,rows}.py.
#include <nanobind/nanobind.h>

#include <memory>

#include "dispatch.h"
#include "kernels.h"
#include "threads.h"

namespace nb = nanobind;
using namespace etserve::cpu;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The calling thread's memory, grown and kept: a step calls each of these once or more, with the same sizes.
void* scratch(int64_t bytes) {
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t size = 0;
  if (bytes > size) {
    memory.reset();
    memory.reset(new char[static_cast<size_t>(bytes)]);
    size = bytes;
  }
  return memory.get();
}

void paged_attention(uintptr_t q, uintptr_t out, int out_type, uintptr_t kv, int kv_type, int num_tokens, int num_seqs,
                     uintptr_t query_start, uintptr_t context_lens, uintptr_t block_tables, int max_blocks,
                     int num_heads, int num_kv_heads, int head_dim, float scale, int window, uintptr_t block_mass,
                     const SelectionArgs* selection) {
  AttentionArgs args{at<const float>(q), at<void>(out), DType(out_type), at<const void>(kv), DType(kv_type), num_seqs,
                     at<const int32_t>(query_start), at<const int32_t>(context_lens), at<const int32_t>(block_tables),
                     max_blocks, num_heads, num_kv_heads, head_dim, scale, window, at<float>(block_mass), nullptr, nullptr};
  nb::gil_scoped_release nogil;
  Pool& pool = global_pool();
  int32_t longest = 0;
  for (int b = 0; b < num_seqs; ++b) longest = args.context_lens[b] > longest ? args.context_lens[b] : longest;
  const int64_t floats = attention_scratch_floats(num_tokens, num_seqs, longest, num_heads, head_dim, pool.size());
  SelectionArgs chosen{};
  int64_t more = 0;
  if (selection) {
    chosen = *selection;
    args.selection = &chosen;
    more = selection_scratch_floats(num_seqs, longest, num_heads, num_kv_heads, pool.size());
  }
  args.scratch = static_cast<float*>(scratch((floats + more) * static_cast<int64_t>(sizeof(float))));
  chosen.scratch = args.scratch + floats;
  pool.run([&](Team& team) { kernels().attention(args, team); });
}

void row_pass(uintptr_t logits, int64_t rows, int64_t vocab, int64_t stride, int k, uintptr_t log_sum_exp,
              uintptr_t entropy, uintptr_t varentropy, uintptr_t argmax, uintptr_t nonfinite, uintptr_t top_values,
              uintptr_t top_ids) {
  RowPassArgs args{at<const float>(logits), rows, vocab, stride, k, at<float>(log_sum_exp), at<float>(entropy),
                   at<float>(varentropy), at<int32_t>(argmax), at<int32_t>(nonfinite), at<float>(top_values),
                   at<int32_t>(top_ids), nullptr};
  nb::gil_scoped_release nogil;
  Pool& pool = global_pool();
  args.scratch = scratch(row_pass_scratch_bytes(rows, vocab, k, pool.size()));
  pool.run([&](Team& team) { kernels().row_pass(args, team); });
}

void sample(uintptr_t logits, int64_t rows, int64_t vocab, int64_t stride, uintptr_t temperature, uintptr_t top_k,
            uintptr_t top_p, uintptr_t min_p, uintptr_t uniform, uintptr_t token_ids, uintptr_t sampled_entropy) {
  SampleArgs args{at<const float>(logits), rows, vocab, stride, at<const float>(temperature), at<const int32_t>(top_k),
                  at<const float>(top_p), at<const float>(min_p), at<const double>(uniform), at<int32_t>(token_ids),
                  at<float>(sampled_entropy), nullptr};
  nb::gil_scoped_release nogil;
  Pool& pool = global_pool();
  args.scratch = scratch(sample_scratch_bytes(vocab, pool.size()));
  pool.run([&](Team& team) { kernels().sample(args, team); });
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("paged_attention", &paged_attention, nb::arg("q"), nb::arg("out"), nb::arg("out_type"), nb::arg("kv"),
        nb::arg("kv_type"), nb::arg("num_tokens"), nb::arg("num_seqs"), nb::arg("query_start"),
        nb::arg("context_lens"), nb::arg("block_tables"), nb::arg("max_blocks"), nb::arg("num_heads"),
        nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("scale"), nb::arg("window"), nb::arg("block_mass"),
        nb::arg("selection").none(), "types: 0 f32, 1 bf16");
  m.def("row_pass", &row_pass, "logits rows vocab stride k log_sum_exp entropy varentropy argmax nonfinite top_values top_ids");
  m.def("sample", &sample, "logits rows vocab stride temperature top_k top_p min_p uniform token_ids sampled_entropy");
}
