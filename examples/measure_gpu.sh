#!/bin/sh
# Measure speculation on one GPU by replays of a recording: one call of at most TOTAL seconds (560), also on a machine that
# has compiled nothing yet. The most telling part comes first, each part loads its engines once, and OUT (results/gpu) gets
# each row when it is measured. Run it again to go on. docs/results/gpu.md has the predictions.
#
#     sh examples/measure_gpu.sh          # every part: 8b, 32b, 8b-at-once, 8b-draft-model
#     sh examples/measure_gpu.sh 32b      # one of them
#
# SHAPES (shapes/) has folders with the models' configurations and tokenizers, without weights:
#     hf download Qwen/Qwen3-32B --exclude "*.safetensors" --local-dir shapes/qwen3-32b
# and the same for Qwen3-1.7B, Qwen3-8B and Qwen3-0.6B. RECORDINGS replaces the recording, and MODES the modes of every part:
# with tiny shapes in SHAPES, whose vocabulary has 16,384 tokens, and MODES=off,lr the script runs on a CPU.
set -u
OUT=${OUT:-results/gpu}
SHAPES=${SHAPES:-shapes}
TOTAL=${TOTAL:-560}
RECORDINGS=${RECORDINGS:-$(dirname "$0")/../docs/measurements/recordings-gsm8k-24.jsonl.xz}
LATER=70 # seconds that each later part is left
started=$(date +%s)
failed=0

# NAME TARGET DRAFT RESERVED MODES OPTIONS...: a part that leaves RESERVED seconds to later ones
measure() {
    name=$1 target=$2 draft=$3 reserved=$4 modes=${MODES:-$5}
    shift 5
    seconds=$((TOTAL - 20 - reserved + started - $(date +%s)))
    if [ "$seconds" -lt 1 ]; then
        echo "== $name: no time is left" >&2
        failed=75
        return
    fi
    echo "== $name$sharing, $seconds seconds"
    timeout -s INT -k 10 $((seconds + 10)) lookahead-agent bench replay "$RECORDINGS" \
        --target-shape "$SHAPES/$target" --draft-shape "$SHAPES/$draft" --modes "$modes" \
        --engine-arg max_num_batched_tokens=4096 --engine-arg max_num_seqs=256 --seconds "$seconds" \
        --out "$OUT/$name$sharing.jsonl" "$@" || failed=$?
}

# An EAGLE-3 head takes the place of the draft model in sd: docs/results/gpu.md has the source of its acceptance.
part() {
    every=off,lr,sd,lr+sd,shared_draft,lr+shared_draft drawn=balanced,random:probability=0.45
    case $1 in
    8b) measure "$1" qwen3-8b qwen3-0.6b "$2" $every --head 0.62,0.62 --policies $drawn --limit 12 ;;
    32b) measure "$1" qwen3-32b qwen3-1.7b "$2" off,lr --policies $drawn --limit 6 ;;
    8b-at-once) measure "$1" qwen3-8b qwen3-0.6b "$2" $every --head 0.62,0.62 --concurrency 8 ;;
    8b-draft-model) measure "$1" qwen3-8b qwen3-0.6b "$2" off,sd --limit 6 ;;
    *)
        echo "no part is called $1: choose from 8b 32b 8b-at-once 8b-draft-model" >&2
        exit 2
        ;;
    esac
}

# Processes of a GPU run at the same time under NVIDIA's Multi-Process Service, and else in turns.
sharing=
if command -v nvidia-cuda-mps-control >/dev/null; then
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
    trap 'exit 130' INT TERM
    nvidia-cuda-mps-control -d && sharing=-mps
fi

[ $# -ne 0 ] || set -- 8b 32b 8b-at-once 8b-draft-model
while [ $# -ne 0 ]; do
    part "$1" $((LATER * ($# - 1)))
    shift
done
exit "$failed"
