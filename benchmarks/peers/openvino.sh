#!/bin/sh
# OpenVINO GenAI on the CPU, its continuous batching behind a small HTTP server. Arguments: port, GGUF file, threads.
# ETSERVE_PEER_OPENVINO_PYTHON: a Python with openvino-genai, openvino-tokenizers and aiohttp.
set -eu
export OPENVINO_TELEMETRY=0 DO_NOT_TRACK=1
exec "$ETSERVE_PEER_OPENVINO_PYTHON" "$(dirname "$0")/openvino_server.py" --model "$2" --port "$1" --threads "$3"
