#!/bin/sh
# Build a quantised demo model for the Japanese adapter.
# Run from the root of the repository: examples/build/build.sh OUTPUT_DIRECTORY
set -eu
manylora build --checkpoint_dir examples/demo/base \
    --output_dir "$1" \
    --dtype bfloat16 \
    --quant_algo W8A16 \
    --max_batch_size 128 \
    --max_seq_len 512 \
    --lora_dir examples/demo/adapters/japanese \
    --lora_ckpt_source hf \
    --max_lora_rank 16 \
    --lora_target_modules "attn_q" "attn_k" "attn_v"
