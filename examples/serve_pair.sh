#!/usr/bin/env bash
# Serve a target and a draft with vLLM, each on a port of its own, until Ctrl-C:
#
#   examples/serve_pair.sh TARGET DRAFT [VLLM ARGUMENT…]
#
# Environment: TARGET_PORT (8000), DRAFT_PORT (8001), PYTHON (python), and on a machine without a GPU TARGET_CORES and
# DRAFT_CORES ("0-5", "6,7"), so that the two do not share any. To grow, give vLLM's own arguments, such as
# --tensor-parallel-size 4, or run each server on its own machine.
set -euo pipefail

target=${1:?"usage: serve_pair.sh TARGET DRAFT [VLLM ARGUMENT…]"}
draft=${2:?"usage: serve_pair.sh TARGET DRAFT [VLLM ARGUMENT…]"}
shift 2

serve() { # MODEL PORT CORES [ARGUMENT…]
    local model=$1 port=$2 cores=$3
    shift 3
    if [[ -n $cores ]]; then export VLLM_CPU_OMP_THREADS_BIND=$cores; fi
    exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 --port "$port" "$@"
}

trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null; wait' EXIT INT TERM
serve "$target" "${TARGET_PORT:-8000}" "${TARGET_CORES:-}" "$@" &
serve "$draft" "${DRAFT_PORT:-8001}" "${DRAFT_CORES:-}" "$@" &
wait
