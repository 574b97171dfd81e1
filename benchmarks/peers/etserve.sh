#!/bin/sh
# etserve. Arguments: port, model, threads. ETSERVE_PEER_FLAGS: further flags of `etserve serve`, for a run of its own.
set -eu
# shellcheck disable=SC2086  # the flags are a list
exec "${ETSERVE_PYTHON:-python3}" -m etserve serve "$2" --served-model-name demo --port "$1" --threads "$3" --max-model-len 2048 \
  --log-level warning ${ETSERVE_PEER_FLAGS:-}
