#!/bin/sh
# llama.cpp's llama-server. Arguments: port, GGUF file, threads. ETSERVE_PEER_LLAMA_SERVER: the binary.
# 32 slots of 2,048 tokens each, so that no workload waits for a slot or is cut.
set -eu
exec "$ETSERVE_PEER_LLAMA_SERVER" --model "$2" --alias demo --host 127.0.0.1 --port "$1" --threads "$3" \
  --parallel 32 --ctx-size 65536 --no-webui
