#!/bin/sh
# Measure speculation on one GPU with made-up weights: one call of at most TOTAL seconds (560), also on a machine that has
# compiled nothing yet. The most telling part comes first, each part loads its engines once, and OUT (results/gpu) gets each
# row when it is measured. Run it again to go on. docs/how-to/gpu.md has the predictions.
#
#     sh examples/measure_gpu.sh          # every part: 8b, then 32b
#     sh examples/measure_gpu.sh 32b      # one of them
#
# SHAPES (shapes/) has folders with the models' configurations and tokenizers, without weights:
#     hf download Qwen/Qwen3-32B --exclude "*.safetensors" --local-dir shapes/qwen3-32b
# and the same for Qwen3-1.7B, Qwen3-8B and Qwen3-0.6B. MODES replaces the modes of every part: with tiny models in SHAPES
# and MODES=off,lr the script runs on a CPU.
set -u
OUT=${OUT:-results/gpu}
SHAPES=${SHAPES:-shapes}
TOTAL=${TOTAL:-560}
COSTS=$(dirname "$0")/../docs/measurements # of an earlier day: they predict the rows
started=$(date +%s)
failed=0

# NAME TARGET DRAFT COSTS RESERVED MODES OPTIONS...: a part that leaves RESERVED seconds to later ones
measure() {
    name=$1 target=$2 draft=$3 predicted=$4 reserved=$5 modes=${MODES:-$6}
    shift 6
    seconds=$((TOTAL - 20 - reserved + started - $(date +%s)))
    if [ "$seconds" -lt 1 ]; then
        echo "== $name: no time is left" >&2
        failed=75
        return
    fi
    echo "== $name$sharing, $seconds seconds"
    timeout -s INT -k 10 $((seconds + 10)) lookahead-agent bench synthetic --dummy-weights \
        --model "$SHAPES/$target" --draft "$SHAPES/$draft" --modes "$modes" --step-tokens 24 --alphas 0.45,0.6 --depths 4 \
        --engine-arg max_num_batched_tokens=4096 --engine-arg max_num_seqs=256 --seconds "$seconds" \
        --costs "$COSTS/gpu-h100-$predicted-costs.json" \
        --out "$OUT/$name$sharing.jsonl" --report "$OUT/$name$sharing.md" "$@" || failed=$?
}

part() {
    case $1 in
    8b) measure 8b qwen3-8b qwen3-0.6b "$costs" "$2" off,lr,sd,shared_draft,lr+sd,lr+shared_draft --replies 1,8 ;;
    32b) measure 32b qwen3-32b qwen3-1.7b 32b "$2" off,lr --steps 12 --repeats 2 ;;
    *)
        echo "no part is called $1: choose from 8b 32b" >&2
        exit 2
        ;;
    esac
}

# Processes of a GPU run at the same time under NVIDIA's Multi-Process Service, and else in turns.
sharing= costs=8b
if command -v nvidia-cuda-mps-control >/dev/null; then
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
    trap 'exit 130' INT TERM
    nvidia-cuda-mps-control -d && sharing=-mps costs=8b-mps-fifth
fi

reserved=200 # seconds for the last part
[ $# -ne 1 ] || reserved=0
for each in ${*:-8b 32b}; do
    [ "$each" != 32b ] || reserved=0
    part "$each" "$reserved"
done
exit "$failed"
