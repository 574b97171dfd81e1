// Bindings of key sketches and of the choice of blocks: addresses in, checked in etserve/kernels/{sketch,attention}.py.
#include <nanobind/nanobind.h>

#include "decoder.h"

namespace nb = nanobind;
using namespace etserve::cpu;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_rule(nb::module_& m) {
  nb::class_<SelectionRule>(m, "SelectionRule")
      .def("__init__",
           [](SelectionRule* rule, int selector, double share, uint64_t seed, int sink_blocks, int recent_blocks,
              int min_kept_blocks, double min_kept_share, int min_context, int dense_layers) {
             new (rule) SelectionRule{static_cast<Selector>(selector), share, seed, sink_blocks, recent_blocks,
                                      min_kept_blocks, min_kept_share, min_context, dense_layers};
           },
           nb::kw_only(), nb::arg("selector"), nb::arg("share"), nb::arg("seed"), nb::arg("sink_blocks"),
           nb::arg("recent_blocks"), nb::arg("min_kept_blocks"), nb::arg("min_kept_share"), nb::arg("min_context"),
           nb::arg("dense_layers"));
}

void bind_arguments(nb::module_& m) {
  nb::class_<SelectionArgs>(m, "SelectionArgs")
      .def("__init__",
           [](SelectionArgs* args, const SelectionRule& rule, uintptr_t sketches, int bits, uintptr_t signs,
              uintptr_t epsilon, uintptr_t is_protected, uintptr_t num_kept, uintptr_t missing, uintptr_t estimated) {
             new (args) SelectionArgs{rule, at<const void>(sketches), bits, at<const float>(signs),
                                      at<const float>(epsilon), at<const uint8_t>(is_protected), at<int32_t>(num_kept),
                                      at<float>(missing), at<float>(estimated), nullptr};
           },
           nb::kw_only(), nb::arg("rule"), nb::arg("sketches"), nb::arg("bits"), nb::arg("signs"), nb::arg("epsilon"),
           nb::arg("is_protected"), nb::arg("num_kept"), nb::arg("missing"), nb::arg("estimated_mass"));
  nb::class_<StepSelection>(m, "StepSelection")
      .def("__init__",
           [](StepSelection* selection, const SelectionRule& rule, uintptr_t epsilon, uintptr_t is_protected,
              uintptr_t read_blocks, uintptr_t missing) {
             new (selection) StepSelection{rule, at<const float>(epsilon), at<const uint8_t>(is_protected),
                                           at<int64_t>(read_blocks), at<float>(missing)};
           },
           nb::kw_only(), nb::arg("rule"), nb::arg("epsilon"), nb::arg("is_protected"), nb::arg("read_blocks"),
           nb::arg("missing"));
}

void write_sketches(uintptr_t kv, int kv_type, uintptr_t sketches, int bits, uintptr_t signs, uintptr_t blocks,
                    int64_t num_blocks, int num_kv_heads, int head_dim) {
  const SketchArgs args{at<const void>(kv), static_cast<DType>(kv_type), at<void>(sketches), bits, at<const float>(signs),
                        at<const int32_t>(blocks), num_blocks, num_kv_heads, head_dim};
  nb::gil_scoped_release nogil;
  global_pool().run([&](Team& team) { kernels().write_sketches(args, team); });
}

}  // namespace

void bind_selection(nb::module_& m) {
  bind_rule(m);
  bind_arguments(m);
  m.def("sketch_bytes", &sketch_bytes, nb::arg("head_dim"), nb::arg("bits"));
  m.def("write_sketches", &write_sketches, "kv kv_type sketches bits signs blocks num_blocks num_kv_heads head_dim");
}
