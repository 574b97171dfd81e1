#!/usr/bin/env bash
# Build etserve._cpu for development, in place: build/dev, then etserve/_cpu*.so. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-}"
if [[ -z "$python" ]]; then python=$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3); fi
python=$("$python" -c 'import sys; print(sys.executable)')
mkdir -p build/dev
exec 9>build/dev/.lock
flock 9
export PATH="$(dirname "$python"):$PATH"
cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" >build/dev/configure.log ||
  { cat build/dev/configure.log >&2; exit 1; }
cmake --build build/dev -j "${JOBS:-2}" "$@"
# A rename, so that a running process keeps the file that it has mapped.
for built in build/dev/_cpu*.so; do
  cp "$built" "etserve/.$(basename "$built").new"
  mv -f "etserve/.$(basename "$built").new" "etserve/$(basename "$built")"
done
