#!/bin/sh
# Benchmark the demo model: 64 requests, 16 concurrent, each for the base model or one of two adapters.
# Run from the root of the repository: examples/bench/bench.sh [OUTPUT_DIRECTORY]
set -eu
out=${1:-bench_out}
model_path=examples/demo/base
dataset_path=$out/dataset.jsonl

# prepare-dataset expects each adapter at <lora-dir>/<id>.
mkdir -p "$out/loras"
ln -sfn "$PWD/examples/demo/adapters/chinese" "$out/loras/0"
ln -sfn "$PWD/examples/demo/adapters/japanese" "$out/loras/1"

manylora prepare-dataset --tokenizer $model_path --output "$dataset_path" \
    --rand-task-id -1 1 --lora-dir "$out/loras" \
    token-norm-dist --num-requests 64 --input-mean 32 --input-stdev 4 --output-mean 16 --output-stdev 2

manylora bench --model $model_path throughput --dataset "$dataset_path" \
    --config examples/bench/config.yaml --num_requests 64 --concurrency 16 \
    --streaming --report_json "$out/report.json"
