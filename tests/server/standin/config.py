"""The inputs and outputs of NVIDIA's `tensorrt_llm` model, tensorrtllm_backend v0.19, as a config.pbtxt."""

from __future__ import annotations

SCALAR = "reshape: { shape: [ ] }"
RAGGED = "allow_ragged_batch: true"
# Type, dimensions, how they are laid out, names.
INPUTS = [
    ("INT32", "-1", RAGGED, "input_ids draft_input_ids decoder_input_ids"),
    ("FP16", "-1, -1", RAGGED, "encoder_input_features prompt_embedding_table lora_weights"),
    ("INT32", "1", SCALAR, "encoder_output_lengths input_lengths request_output_len num_return_sequences"),
    ("INT32", "1", SCALAR, "decoder_input_lengths end_id pad_id beam_width runtime_top_k min_length"),
    ("INT32", "1", SCALAR, "runtime_top_p_reset_ids prompt_vocab_size"),
    ("FP32", "-1, -1", RAGGED, "draft_logits"),
    ("FP32", "1", SCALAR, "draft_acceptance_threshold temperature runtime_top_p runtime_top_p_min"),
    ("FP32", "1", SCALAR, "runtime_top_p_decay len_penalty repetition_penalty beam_search_diversity_rate"),
    ("FP32", "1", SCALAR, "presence_penalty frequency_penalty"),
    ("INT32", "2, -1", RAGGED, "stop_words_list bad_words_list"),
    ("FP32", "-1", RAGGED, "embedding_bias"),
    ("BOOL", "1", SCALAR, "early_stopping return_log_probs return_context_logits return_generation_logits"),
    ("BOOL", "1", SCALAR, "return_perf_metrics exclude_input_in_output stop streaming"),
    ("UINT64", "1", SCALAR, "random_seed lora_task_id"),
    ("UINT64", "-1", RAGGED, "prompt_table_extra_ids"),
    ("BOOL", "-1, -1", RAGGED, "cross_attention_mask"),
    ("FP32", "-1", "", "mrope_rotary_cos_sin"),
    ("INT64", "1", "", "mrope_position_deltas"),
    ("INT32", "-1, 3", RAGGED, "lora_config"),
    ("UINT8", "-1", RAGGED, "context_phase_params"),
    ("BOOL", "1", RAGGED, "skip_cross_attn_blocks"),
    ("INT32", "-1", RAGGED, "retention_token_range_starts retention_token_range_ends"),
    ("INT32", "-1", RAGGED, "retention_token_range_priorities retention_token_range_durations_ms"),
    ("INT32", "1", RAGGED, "retention_decode_priority retention_decode_duration_ms"),
    ("STRING", "1", RAGGED, "guided_decoding_guide_type guided_decoding_guide"),
    ("INT32", "1", RAGGED, "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size"),
]
OUTPUTS = [
    ("INT32", "-1, -1", "output_ids"),
    ("INT32", "-1", "sequence_length"),
    ("FP32", "-1", "cum_log_probs"),
    ("FP32", "-1, -1", "output_log_probs context_logits"),
    ("FP32", "-1, -1, -1", "generation_logits"),
    ("INT32", "1", "batch_index sequence_index"),
    ("UINT8", "-1", "context_phase_params"),
    ("INT32", "1", "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks"),
    ("INT64", "1", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"),
    ("FP32", "1", "acceptance_rate"),
    ("INT32", "1", "total_accepted_draft_tokens total_draft_tokens"),
]
LATER = [("INT32", "1", SCALAR, "prompt_ignore_length")]
REQUIRED = ("input_lengths", "request_output_len")
RENAMED = {"random_seed": "seed", "min_length": "min_tokens"}  # from v0.20 on


def config(name: str, parameters: dict[str, str], *, decoupled: bool = True, renamed: bool = False) -> str:
    """renamed: with the names of the releases after v0.19, and the input that came in May 2026."""
    lines = [
        f'name: "{name}"',
        'backend: "python"',
        "max_batch_size: 8",
        f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}",
        "dynamic_batching { }",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
    ]
    for kind, dims, layout, names in [*INPUTS, *(LATER if renamed else [])]:
        for name in names.split():
            name = RENAMED.get(name, name) if renamed else name
            optional = "" if name in REQUIRED else "optional: true"
            lines.append(
                f'input {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] {layout} {optional} }}'
            )
    for kind, dims, names in OUTPUTS:
        lines += [
            f'output {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}' for name in names.split()
        ]
    # As a template that was not filled: NVIDIA's own way to say "unset".
    given = {"lora_cache_max_adapter_size": "${lora_cache_max_adapter_size}", **parameters}
    lines += [
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in given.items()
    ]
    return "\n".join(lines) + "\n"
