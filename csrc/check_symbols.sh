#!/usr/bin/env bash
# Fail if a per-ISA object defines a weak symbol: the linker would keep one copy, perhaps the AVX-512 one, for everybody.
set -euo pipefail
cd "$(dirname "$0")/.."
found=0
while IFS= read -r object; do
  if weak=$(nm -C --defined-only "$object" | grep -E ' [WVu] '); then
    echo "$object:" >&2
    echo "$weak" >&2
    found=1
  fi
done < <(find "${1:-build/dev}" -path '*CMakeFiles/etserve_*.dir/*.o')
exit "$found"
