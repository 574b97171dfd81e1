#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "decoder.h"

namespace nb = nanobind;
using namespace etserve::cpu;

namespace {

template <int NDIM>
using Int32 = nb::ndarray<const int32_t, nb::ndim<NDIM>, nb::c_contig, nb::device::cpu>;

const float* floats(uintptr_t address) { return reinterpret_cast<const float*>(address); }

void forward(Decoder& decoder, const Int32<1>& token_ids, const Int32<1>& positions, const Int32<1>& query_start,
             const Int32<1>& context_lens, const Int32<2>& block_tables, const Int32<1>& logit_rows, uintptr_t kv,
             int64_t num_blocks, uintptr_t hidden, uintptr_t sketches, int sketch_bits, uintptr_t signs,
             const StepSelection* selection, uintptr_t block_mass) {
  const size_t seqs = context_lens.shape(0);
  if (positions.shape(0) != token_ids.shape(0) || query_start.shape(0) != seqs + 1 || block_tables.shape(0) != seqs)
    throw std::invalid_argument("the step's arrays do not fit together");
  const Step step{token_ids.data(), positions.data(), query_start.data(), context_lens.data(), block_tables.data(),
                  logit_rows.data(), static_cast<int64_t>(token_ids.shape(0)), static_cast<int64_t>(seqs),
                  static_cast<int64_t>(block_tables.shape(1)), static_cast<int64_t>(logit_rows.shape(0)),
                  reinterpret_cast<void*>(kv), num_blocks, reinterpret_cast<void*>(sketches), sketch_bits,
                  floats(signs), selection, reinterpret_cast<float*>(block_mass)};
  nb::gil_scoped_release nogil;
  decoder.forward(step, reinterpret_cast<float*>(hidden));
}

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<LayerWeights>(m, "LayerWeights")
      .def("__init__",
           [](LayerWeights* layer, std::vector<PackedMatrix> qkv, const PackedMatrix& o, const PackedMatrix& gate_up,
              const PackedMatrix& down, uintptr_t input_norm, uintptr_t post_norm, uintptr_t q_norm, uintptr_t k_norm) {
             new (layer) LayerWeights{std::move(qkv), o, gate_up, down, floats(input_norm), floats(post_norm), floats(q_norm),
                                      floats(k_norm)};
           },
           nb::arg("qkv"), nb::arg("o"), nb::arg("gate_up"), nb::arg("down"), nb::arg("input_norm"),
           nb::arg("post_norm"), nb::arg("q_norm"), nb::arg("k_norm"));
  nb::class_<DecoderShape>(m, "DecoderShape")
      .def("__init__",
           [](DecoderShape* shape, int hidden, int intermediate, int num_heads, int num_kv_heads, int head_dim,
              int rotary_dim, int vocab, int max_position, int window, float eps, int kv_type) {
             new (shape) DecoderShape{hidden, intermediate, num_heads,    num_kv_heads, head_dim,
                                      rotary_dim, vocab,    max_position, window,       eps,
                                      static_cast<DType>(kv_type)};
           },
           nb::kw_only(), nb::arg("hidden"), nb::arg("intermediate"), nb::arg("num_heads"), nb::arg("num_kv_heads"),
           nb::arg("head_dim"), nb::arg("rotary_dim"), nb::arg("vocab"), nb::arg("max_position"), nb::arg("window"),
           nb::arg("eps"), nb::arg("kv_type"));
  nb::class_<Decoder>(m, "Decoder")
      .def("__init__",
           [](Decoder* decoder, const DecoderShape& shape, std::vector<LayerWeights> layers, uintptr_t final_norm,
              const PackedMatrix& head, uintptr_t embedding, int embedding_type, uintptr_t cos, uintptr_t sin,
              const PackedMatrix* table) {
             new (decoder) Decoder(shape, std::move(layers), floats(final_norm), head,
                                   reinterpret_cast<const void*>(embedding), static_cast<DType>(embedding_type),
                                   floats(cos), floats(sin), table);
           },
           nb::arg("shape"), nb::arg("layers"), nb::arg("final_norm"), nb::arg("head"), nb::arg("embedding"),
           nb::arg("embedding_type"), nb::arg("cos"), nb::arg("sin"), nb::arg("table").none() = nb::none())
      .def("forward", &forward, nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("query_start").noconvert(), nb::arg("context_lens").noconvert(),
           nb::arg("block_tables").noconvert(), nb::arg("logit_rows").noconvert(), nb::arg("kv"), nb::arg("num_blocks"),
           nb::arg("hidden"), nb::arg("sketches") = 0, nb::arg("sketch_bits") = 0, nb::arg("signs") = 0,
           nb::arg("selection").none() = nb::none(), nb::arg("block_mass") = 0)
      .def("logits",
           [](Decoder& decoder, uintptr_t hidden, int64_t rows, uintptr_t out) {
             decoder.logits(floats(hidden), rows, reinterpret_cast<float*>(out));
           },
           nb::arg("hidden"), nb::arg("rows"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "measure_phases", [](Decoder& decoder, bool is_on) { decoder.clock.is_on = is_on; }, nb::arg("is_on"))
      .def("take_phases", [](Decoder& decoder) {
        constexpr const char* names[] = {"setup", "elementwise", "matrices", "kv_write", "attention", "head"};
        static_assert(std::size(names) == static_cast<size_t>(Phase::count));
        nb::dict seconds;
        const auto found = decoder.clock.take();
        for (size_t i = 0; i < found.size(); ++i) seconds[names[i]] = static_cast<double>(found[i]) * 1e-9;
        return seconds;
      });
}
