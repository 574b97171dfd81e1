#!/usr/bin/env bash
# Build the CUDA kernels without CMake, for development and tests:
#   csrc/build_cuda.sh emulator OUT.so     the same source under g++, on the CPU (csrc/cuda/emulation.h)
#   csrc/build_cuda.sh device OUT.so       nvcc, all targets, two at a time; what ptxas says goes to stderr
# CXX and NVCC choose the compilers, CXXFLAGS adds to the emulator's flags.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
kind="$1" out="$2"
objects="$(mktemp -d)"
trap 'rm -rf "$objects"' EXIT
compile_emulator() {
  # shellcheck disable=SC2086  # CXXFLAGS is a list
  "${CXX:-g++}" -x c++ -std=c++20 -O2 -g -fPIC -fvisibility=hidden -ffp-contract=off -DETSERVE_EMULATE ${CXXFLAGS:-} \
    -Wall -Wextra -Wno-unknown-pragmas -I "$here/include" -c "$1" -o "$objects/$(basename "$1").o"
}
compile_device() {
  local targets=()
  for sm in 80 90 100 120; do targets+=(-gencode "arch=compute_$sm,code=sm_$sm"); done
  # Into a file first: two compilers' reports must not mix.
  "${NVCC:-nvcc}" -std=c++17 -O3 -Xcompiler -fPIC,-fvisibility=hidden -Xptxas -v "${targets[@]}" \
    -I "$here/include" -c "$1" -o "$objects/$(basename "$1").o" >"$objects/$(basename "$1").log" 2>&1 || local code=$?
  cat "$objects/$(basename "$1").log" >&2
  return "${code:-0}"
}
case "$kind" in
  emulator)
    for source in "$here"/cuda/*.cu "$here"/cuda/emulation.cpp; do compile_emulator "$source" & done
    for job in $(jobs -p); do wait "$job"; done
    "${CXX:-g++}" -shared -o "$out" "$objects"/*.o ${CXXFLAGS:-}
    ;;
  device)
    for source in "$here"/cuda/*.cu; do
      while (($(jobs -rp | wc -l) >= 2)); do wait -n; done
      compile_device "$source" &
    done
    for job in $(jobs -p); do wait "$job"; done
    "${NVCC:-nvcc}" -shared -cudart static -o "$out" "$objects"/*.o
    ;;
  *)
    echo "usage: $0 emulator|device OUT.so" >&2
    exit 2
    ;;
esac
