#!/bin/sh
# Measure speculation on one GPU with made-up weights, the most telling part first. Each part ends within LIMIT seconds
# (300), keeps its rows in OUT (results/gpu) and goes on there when it is run again. On a machine that has compiled
# nothing yet, engines of 8B take up to three of the first part's minutes to start.
#
#     sh examples/measure_gpu.sh              # every part
#     sh examples/measure_gpu.sh 8b mps       # some of them
#
# SHAPES (shapes/) has folders with the models' configurations and tokenizers, without weights:
#     hf download Qwen/Qwen3-32B --exclude "*.safetensors" --local-dir shapes/qwen3-32b
# and the same for Qwen3-1.7B, Qwen3-8B and Qwen3-0.6B.
set -u
OUT=${OUT:-results/gpu}
SHAPES=${SHAPES:-shapes}
LIMIT=${LIMIT:-300}
STEPS_AND_TOKENS=off,lr,shared_draft,lr+shared_draft
failed=0

# NAME TARGET DRAFT OPTIONS...
measure() {
    name=$1 target=$2 draft=$3
    shift 3
    echo "== $name"
    timeout -s INT -k 20 "$LIMIT" lookahead-agent bench synthetic --dummy-weights \
        --model "$SHAPES/$target" --draft "$SHAPES/$draft" --step-tokens 24 --alphas 0.6,0.8 --depths 4,8 \
        --engine-arg max_num_batched_tokens=4096 --engine-arg max_num_seqs=256 --seconds "$LIMIT" \
        --out "$OUT/$name.jsonl" --report "$OUT/$name.md" "$@" || failed=$?
}

part() {
    case $1 in
    start) measure start qwen3-8b qwen3-0.6b --modes off,lr --alphas 0.6 --depths 4 --steps 2 --repeats 1 \
        --engine-arg enforce_eager=true ;;
    8b) measure 8b qwen3-8b qwen3-0.6b --modes "$STEPS_AND_TOKENS,sd,lr+sd" --costs "$OUT/costs-8b.json" ;;
    32b) measure 32b qwen3-32b qwen3-1.7b --modes off,lr --steps 12 --costs "$OUT/costs-32b.json" ;;
    many) measure many qwen3-8b qwen3-0.6b --modes "$STEPS_AND_TOKENS" --alphas 0.6 --depths 4 --replies 8,32 --repeats 2 ;;
    runner) VLLM_USE_V2_MODEL_RUNNER=1 measure runner qwen3-8b qwen3-0.6b --modes off,sd ;;
    mps)
        # Processes of a GPU run at the same time under NVIDIA's Multi-Process Service, and else in turns.
        if ! nvidia-cuda-mps-control -d; then
            failed=1
            return
        fi
        measure mps qwen3-8b qwen3-0.6b --modes "$STEPS_AND_TOKENS" --costs "$OUT/costs-8b-mps.json"
        echo quit | nvidia-cuda-mps-control
        ;;
    *)
        echo "no part is called $1: choose from start 8b mps many 32b runner" >&2
        exit 2
        ;;
    esac
}

for each in ${*:-start 8b mps many 32b runner}; do part "$each"; done
exit "$failed"
