// What a caller asks of the library itself.
#include "device.h"

extern "C" {

const char* etserve_cuda_error_string(int code) {
#ifdef ETSERVE_EMULATE
  return code == 0 ? "no error" : "invalid argument";
#else
  return cudaGetErrorString(static_cast<cudaError_t>(code));
#endif
}

int etserve_cuda_is_emulated(void) {
#ifdef ETSERVE_EMULATE
  return 1;
#else
  return 0;
#endif
}

void etserve_cuda_set_emulation_seed(uint64_t seed) {
#ifdef ETSERVE_EMULATE
  etserve::emulation::set_seed(seed);
#else
  (void)seed;
#endif
}

}  // extern "C"
