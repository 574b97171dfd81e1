// Matrix products, element-wise kernels and machine ceilings. Addresses come from checked tensors (etserve/kernels/).
#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <vector>

#include "dispatch.h"
#include "quant.h"

namespace nb = nanobind;
using namespace etserve::cpu;

namespace {

using Clock = std::chrono::steady_clock;

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

DType to_dtype(int code) {
  if (code < 0 || code > 2) throw std::invalid_argument("dtype code must be 0 (f32), 1 (bf16) or 2 (f16)");
  return static_cast<DType>(code);
}

PackedMatrix make_matrix(int type, int64_t n, int64_t k, bool paired, uintptr_t data, uintptr_t bias, int input) {
  if (n < 1 || k < 1) throw std::invalid_argument("a packed matrix needs n and k of at least 1");
  PackedMatrix m;
  m.type = type > 2 && type <= 8 ? static_cast<DType>(type) : to_dtype(type);
  m.input = to_dtype(input);
  if (is_quantised(m.type) && k % quant_size(m.type).block_weights)
    throw std::invalid_argument("quantised weights need k in whole blocks");
  if (m.input == DType::f16) throw std::invalid_argument("activations are f32 or bf16");
  m.n = n;
  m.k = k;
  m.paired = paired;
  m.data = at<const void>(data);
  m.bias = at<const float>(bias);
  return m;
}

void pack(const PackedMatrix& m, uintptr_t rows, int64_t count, int64_t first, int half) {
  if (first < 0 || count < 0 || first + count > m.n || half < 0 || half > (m.paired ? 1 : 0))
    throw std::invalid_argument("rows to pack lie outside the matrix");
  const char* from = at<const char>(rows);
  void* to = const_cast<void*>(m.data);
  global_pool().run([&](Team& team) {
    int64_t begin, end;
    team.split(count, 1, &begin, &end);
    pack_rows(m, to, from + begin * m.row_bytes(), end - begin, first + begin, half);
  });
}

void round_all(int type, uintptr_t x, int64_t rows, int64_t k, uintptr_t blocks) {
  if (type < 3 || type > 5 || rows < 0 || k < 0 || k % kQuantBlock)
    throw std::invalid_argument("rounding is to q8_0, q4_0 or q4_1, in blocks of 32");
  const DType kind = static_cast<DType>(type);
  const int64_t row_bytes = k / kQuantBlock * quant_size(kind).block_bytes;
  global_pool().run([&](Team& team) {
    int64_t begin, end;
    team.split(rows, 1, &begin, &end);
    round_to_blocks(kind, at<const float>(x) + begin * k, end - begin, k, at<char>(blocks) + begin * row_bytes);
  });
}

// x: f32 [rows][k], contiguous; rounded to bf16 first where the weights are.
void run_matmul(uintptr_t x, int64_t rows, const PackedMatrix& w, int epilogue, uintptr_t out, int64_t out_stride) {
  if (epilogue < 0 || epilogue > 2) throw std::invalid_argument("unknown epilogue");
  MatmulArgs args{at<const void>(x), rows, w.k, w, static_cast<Epilogue>(epilogue), at<void>(out), out_stride};
  if ((args.epilogue == Epilogue::silu_mul) != w.paired) throw std::invalid_argument("silu_mul needs a paired matrix");
  std::vector<uint16_t> rounded;
  if (w.activation() == DType::bf16) {
    args.x_stride = w.padded_k();
    rounded.resize(static_cast<size_t>(rows * args.x_stride));
    args.x = rounded.data();
  }
  std::vector<char> scratch;
  if (is_quantised(w.type)) {
    scratch.resize(static_cast<size_t>(quant_scratch_bytes(rows, w.k, global_pool().size()) + 64));
    args.scratch = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
  }
  global_pool().run([&](Team& team) {
    if (!rounded.empty()) {
      decoder_kernels().round_rows({at<const float>(x), rows, w.k, rounded.data(), args.x_stride}, team);
      team.barrier();
    }
    decoder_kernels().matmul(args, team);
  });
}

void run_rms_norm(uintptr_t x, int64_t rows, int64_t size, uintptr_t weight, float eps, int type, uintptr_t out) {
  const NormArgs args{at<const float>(x), rows, size, size, at<const float>(weight), eps, at<void>(out), to_dtype(type),
                      size};
  global_pool().run([&](Team& team) { decoder_kernels().rms_norm(args, team); });
}

void run_silu_mul(uintptr_t gate, uintptr_t up, int64_t rows, int64_t size, int type, uintptr_t out) {
  const SiluMulArgs args{at<const float>(gate), at<const float>(up), rows, size, at<void>(out), to_dtype(type), size};
  global_pool().run([&](Team& team) { decoder_kernels().silu_mul(args, team); });
}

void run_rope(uintptr_t qkv, int64_t tokens, int num_heads, int num_kv_heads, int head_dim, int rotary_dim,
              uintptr_t cos, uintptr_t sin, uintptr_t positions, uintptr_t slots, uintptr_t q_norm, uintptr_t k_norm,
              float eps, uintptr_t q, uintptr_t kv, int kv_type) {
  const RopeArgs args{at<const float>(qkv), tokens, num_heads, num_kv_heads, head_dim, rotary_dim, at<const float>(cos),
                      at<const float>(sin), at<const int32_t>(positions), at<const int64_t>(slots),
                      at<const float>(q_norm), at<const float>(k_norm), eps, at<float>(q), at<void>(kv),
                      static_cast<DType>(kv_type)};
  global_pool().run([&](Team& team) { decoder_kernels().rope_and_write(args, team); });
}

// Bytes a second that the pool reads from a buffer of `num_bytes` (rounded down to 4 KiB a thread).
double measure_bandwidth(int64_t num_bytes, double seconds) {
  Pool& pool = global_pool();
  const int64_t share = num_bytes / pool.size() / 4096 * 4096;
  if (share < 4096 || !(seconds > 0.0)) throw std::invalid_argument("needs at least 4096 bytes a thread and some time");
  std::vector<char> buffer(static_cast<size_t>(share * pool.size()), 1);
  std::vector<float> sums(static_cast<size_t>(pool.size()));
  int64_t sweeps = 0;
  const auto start = Clock::now();
  double elapsed = 0.0;
  while (elapsed < seconds) {
    pool.run([&](Team& team) {
      const char* part = buffer.data() + team.rank() * share;
      sums[static_cast<size_t>(team.rank())] += decoder_kernels().read_bytes(part, share);
    });
    ++sweeps;
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  return static_cast<double>(sweeps * share * pool.size()) / elapsed;
}

// Multiply-adds in registers, in FLOP/s of the whole pool: what no matrix product can exceed.
double measure_matrix_rate(int type, double seconds) {
  if (!(seconds > 0.0)) throw std::invalid_argument("needs some time");
  const DType dtype = to_dtype(type);
  Pool& pool = global_pool();
  std::vector<float> sums(static_cast<size_t>(pool.size()));
  constexpr int64_t kIterations = 200'000;
  int64_t rounds = 0;
  const auto start = Clock::now();
  double elapsed = 0.0;
  while (elapsed < seconds) {
    pool.run([&](Team& team) {
      sums[static_cast<size_t>(team.rank())] += decoder_kernels().dot_in_registers(dtype, kIterations);
    });
    ++rounds;
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  return static_cast<double>(rounds * kIterations * pool.size()) * dot_flops(dtype) / elapsed;
}

// A self-test of the pool: every member adds its rank to each of `phases` slots behind a barrier and takes its share of
// `items` handed out one by one. Returns how many items were handed out over all phases.
int64_t exercise_team(int phases, int64_t items) {
  Pool& pool = global_pool();
  std::vector<std::atomic<int64_t>> taken(static_cast<size_t>(phases));
  std::vector<std::atomic<int>> wrong(1);
  pool.run([&](Team& team) {
    for (int phase = 0; phase < phases; ++phase) {
      while (team.next() < items) taken[static_cast<size_t>(phase)].fetch_add(1);
      team.barrier();
      if (taken[static_cast<size_t>(phase)].load() != items) wrong[0].fetch_add(1);
    }
  });
  if (wrong[0].load() != 0) throw std::runtime_error("a barrier let a member through too early");
  int64_t sum = 0;
  for (const auto& count : taken) sum += count.load();
  return sum;
}

}  // namespace

void bind_matrix(nb::module_& m) {
  using Nogil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<PackedMatrix>(m, "Matrix")
      .def_ro("n", &PackedMatrix::n)
      .def_ro("k", &PackedMatrix::k)
      .def_ro("paired", &PackedMatrix::paired)
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes);
  m.def("make_matrix", &make_matrix, nb::arg("type"), nb::arg("n"), nb::arg("k"), nb::arg("paired"), nb::arg("data"),
        nb::arg("bias"), nb::arg("input") = 0);
  m.def("pack_rows", &pack, nb::arg("matrix"), nb::arg("rows"), nb::arg("count"), nb::arg("first"), nb::arg("half"),
        Nogil());
  m.def("round_to_blocks", &round_all, nb::arg("type"), nb::arg("x"), nb::arg("rows"), nb::arg("k"), nb::arg("blocks"),
        Nogil());
  m.def("unpack_row", [](const PackedMatrix& w, int64_t row, uintptr_t out) {
    if (row < 0 || row >= w.n || w.paired) throw std::invalid_argument("no such row");
    unpack_row(w, row, at<float>(out));
  });
  m.def("matmul", &run_matmul, nb::arg("x"), nb::arg("rows"), nb::arg("matrix"), nb::arg("epilogue"), nb::arg("out"),
        nb::arg("out_stride"), Nogil());
  m.def("rms_norm", &run_rms_norm, Nogil());
  m.def("silu_mul", &run_silu_mul, Nogil());
  m.def("rope_and_write", &run_rope, Nogil());
  m.def("measure_bandwidth", &measure_bandwidth, nb::arg("num_bytes"), nb::arg("seconds"), Nogil());
  m.def("measure_matrix_rate", &measure_matrix_rate, nb::arg("type"), nb::arg("seconds"), Nogil());
  m.def("exercise_team", &exercise_team, nb::arg("phases"), nb::arg("items"), Nogil());
}
