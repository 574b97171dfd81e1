// Which instruction set runs. Chosen once, when the module is imported: the best that the processor has, or what the
// environment variable ETSERVE_ISA (generic, avx2, avx512) asks for; avx512 stands for AVX-512 F/BW/VL/DQ/VNNI/BF16.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"
#include "matrix.h"

namespace etserve::cpu {

const char* isa_name();                    // "generic", "avx2", "avx512"
std::vector<std::string> available_isas();  // that this processor runs, weakest first
void use_isa(const std::string& name);     // for tests; not while kernels run. Throws std::invalid_argument

const KernelTable& kernels();                 // of the set in use
const DecoderKernels& decoder_kernels();      // likewise

}  // namespace etserve::cpu

// A kernel's definition in csrc/cpu/isa/NAME.cpp:
//   namespace etserve::cpu::ETSERVE_ISA { void attention(const AttentionArgs& args, Team& team) {...} }
// with every helper in an anonymous namespace inside it (csrc/check_symbols.sh looks for weak symbols).
