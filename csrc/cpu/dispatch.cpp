#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>

#if defined(ETSERVE_X86)
#include <cpuid.h>
#endif

#if defined(ETSERVE_HAS_ROWS)
#define ETSERVE_ROW_KERNELS(isa) &isa::attention, &isa::row_pass, &isa::sample, &isa::write_sketches
#else
#define ETSERVE_ROW_KERNELS(isa) nullptr, nullptr, nullptr, nullptr
#endif

#define ETSERVE_DECLARE(isa)                        \
  namespace isa {                                   \
  void attention(const AttentionArgs&, Team&);      \
  void row_pass(const RowPassArgs&, Team&);         \
  void sample(const SampleArgs&, Team&);            \
  void write_sketches(const SketchArgs&, Team&);    \
  void matmul(const MatmulArgs&, Team&);            \
  void rms_norm(const NormArgs&, Team&);            \
  void rope_and_write(const RopeArgs&, Team&);      \
  void silu_mul(const SiluMulArgs&, Team&);         \
  void round_rows(const RoundArgs&, Team&);         \
  float dot_in_registers(DType, int64_t);           \
  float read_bytes(const void*, int64_t);           \
  }

#define ETSERVE_DECODER_KERNELS(isa)                                                             \
  &isa::matmul, &isa::rms_norm, &isa::rope_and_write, &isa::silu_mul, &isa::round_rows,          \
      &isa::dot_in_registers, &isa::read_bytes

namespace etserve::cpu {

ETSERVE_DECLARE(generic)
#if defined(ETSERVE_X86)
ETSERVE_DECLARE(avx2)
ETSERVE_DECLARE(avx512)
#endif

namespace {

struct Isa {
  const char* name;
  bool (*is_supported)();
  KernelTable kernels;
  DecoderKernels decoder_kernels;
};

bool always() { return true; }

#if defined(ETSERVE_X86)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
  if (!has_avx2() || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vnni"))
    return false;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // leaf 7.1: EAX bit 5 is AVX512_BF16
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1u << 5));
}
#endif

const Isa kIsas[] = {
    {"generic", always, {"generic", ETSERVE_ROW_KERNELS(generic)}, {ETSERVE_DECODER_KERNELS(generic)}},
#if defined(ETSERVE_X86)
    {"avx2", has_avx2, {"avx2", ETSERVE_ROW_KERNELS(avx2)}, {ETSERVE_DECODER_KERNELS(avx2)}},
    {"avx512", has_avx512, {"avx512", ETSERVE_ROW_KERNELS(avx512)}, {ETSERVE_DECODER_KERNELS(avx512)}},
#endif
};

const Isa* find(const std::string& name) {
  for (const Isa& isa : kIsas)
    if (name == isa.name && isa.is_supported()) return &isa;
  return nullptr;
}

// A wish that this processor cannot fulfil gives the best that it can; a name that nobody knows is refused.
const Isa* choose() {
  const char* wish = std::getenv("ETSERVE_ISA");
  const std::string name = wish ? wish : "";
  if (!name.empty() && name != "generic" && name != "avx2" && name != "avx512")
    throw std::invalid_argument("ETSERVE_ISA must be generic, avx2 or avx512, got '" + name + "'");
  const Isa* chosen = find(name);
  if (chosen) return chosen;
  for (const Isa& isa : kIsas)
    if (isa.is_supported()) chosen = &isa;
  return chosen;
}

const Isa* in_use() {
  static const Isa* first = choose();
  return first;
}

const Isa* g_isa = nullptr;

const Isa& current() { return *(g_isa ? g_isa : in_use()); }

}  // namespace

const char* isa_name() { return current().name; }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas)
    if (isa.is_supported()) names.emplace_back(isa.name);
  return names;
}

void use_isa(const std::string& name) {
  const Isa* isa = find(name);
  if (!isa) throw std::invalid_argument("this processor or build has no instruction set '" + name + "'");
  g_isa = isa;
}

const KernelTable& kernels() { return current().kernels; }

const DecoderKernels& decoder_kernels() { return current().decoder_kernels; }

}  // namespace etserve::cpu
