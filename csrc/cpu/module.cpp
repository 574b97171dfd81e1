// etserve._cpu: raw pointers in, the GIL released around the work. The checks stand in etserve/kernels/.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dispatch.h"
#include "threads.h"

namespace nb = nanobind;
using namespace etserve::cpu;

void bind_matrix(nb::module_& m);
void bind_decoder(nb::module_& m);
#if defined(ETSERVE_HAS_ROWS)
void bind_rows(nb::module_& m);
void bind_selection(nb::module_& m);
#endif

NB_MODULE(_cpu, m) {
  isa_name();  // a wrong ETSERVE_ISA stops the import
  m.doc() = "etserve's native CPU kernels";
  m.def("isa", [] { return std::string(isa_name()); }, "The instruction set in use.");
  m.def("available_isas", &available_isas, "The instruction sets that this processor runs, weakest first.");
  m.def("use_isa", &use_isa, nb::arg("name"), "Switch the instruction set; not while kernels run.");
  m.def("set_num_threads", [](int count) { nb::gil_scoped_release nogil; set_num_threads(count); }, nb::arg("count"),
        "Replace the pool by one of `count` threads, the caller included; not while kernels run.");
  m.def("num_threads", [] { return global_pool().size(); });
  bind_matrix(m);
  bind_decoder(m);
#if defined(ETSERVE_HAS_ROWS)
  bind_selection(m);
  bind_rows(m);
#endif
}
