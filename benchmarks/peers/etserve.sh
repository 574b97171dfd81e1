#!/bin/sh
# etserve with the demo model. Arguments: port, model, threads.
set -eu
exec "${ETSERVE_PYTHON:-python3}" -m etserve serve "$2" --served-model-name demo --port "$1" --threads "$3" --max-model-len 2048 \
  --dtype bfloat16 --log-level warning
