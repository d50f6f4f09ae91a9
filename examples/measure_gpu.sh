#!/bin/sh
# Measure the paper's arrangement on one GPU: costs, every way of writing at acceptance rates that are drawn, and the
# packaged pair on problems. In pieces: it ends by itself after PIECE seconds (540) with status 75; run it again until it
# says that everything is measured. Nothing is measured twice.
#
#     DATASET=problems.jsonl sh examples/measure_gpu.sh
#
# shapes/ has folders with the models' configurations and tokenizers, without weights:
#     hf download Qwen/Qwen3-32B --exclude "*.safetensors" --local-dir shapes/qwen3-32b
# and the same for Qwen3-1.7B, Qwen3-8B and Qwen3-0.6B.
set -u
OUT=${OUT:-results/gpu}
END=$(($(date +%s) + ${PIECE:-540}))

left() {
    seconds=$((END - $(date +%s)))
    if [ "$seconds" -lt 20 ]; then
        echo "this piece is over: run the same again"
        exit 75
    fi
}

# NAME TARGET DRAFT MORE...: with made-up weights.
synthetic() {
    name=$1 target=$2 draft=$3
    shift 3
    left
    lookahead-agent bench synthetic --model "shapes/$target" --draft "shapes/$draft" --dummy-weights \
        --costs "$OUT/costs-$name.json" --out "$OUT/synthetic-$name.jsonl" \
        --report "$OUT/synthetic-$name.md" --seconds "$seconds" "$@" || exit $?
}

# REPLIES: the packaged pair on problems, in every mode. The engines of all modes are in memory at once, about eight, so
# each gets a tenth of the GPU's.
problems() {
    left
    timeout -s INT "$seconds" lookahead-agent bench --dataset "$DATASET" --limit 100 --concurrency "$1" --max-tokens 512 \
        --modes "${MODES:-off,auto,sd,shared_draft,lr,lr+sd,lr+shared_draft}" --engine-arg gpu_memory_utilization=0.1 \
        --out "$OUT/problems-$1.jsonl"
    status=$?
    if [ "$status" -eq 124 ]; then
        echo "this piece is over: run the same again"
        exit 75
    fi
    [ "$status" -eq 0 ] || exit "$status"
    lookahead-agent bench report "$OUT/problems-$1.jsonl" --output "$OUT/problems-$1.md" || exit $?
}

synthetic 32b qwen3-32b qwen3-1.7b --alphas 0.4,0.6,0.8 --depths 1,2,4,8
synthetic 32b-eager qwen3-32b qwen3-1.7b --alphas 0.6 --depths 4 --repeats 1 --engine-arg enforce_eager=true
synthetic 32b-many qwen3-32b qwen3-1.7b --alphas 0.6 --depths 2,4 --replies 8,32 --repeats 1
synthetic 8b qwen3-8b qwen3-0.6b --alphas 0.4,0.6,0.8 --depths 1,2,4,8
if [ -n "${DATASET:-}" ]; then
    for replies in 1 8 32; do
        problems "$replies"
    done
fi
echo "all measured: $OUT"
