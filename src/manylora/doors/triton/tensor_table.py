"""Every tensor of the models as one table: tensorrtllm_backend v0.19, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from manylora.generation.sampling import PARAMETERS, parameters_of

DTYPES: dict[str, type] = {
    "FP32": np.float32, "INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "BOOL": np.bool_,
    "STRING": np.object_,
}  # fmt: skip
"""NumPy's, for those that we make."""


@dataclass(frozen=True)
class Tensor:
    """dims without the batch dimension. scalar: dims [1] reshaped away, so that the model sees [batch]."""

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    scalar: bool = False
    ragged: bool = False


@dataclass(frozen=True)
class Model:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def _many(dtype: str, names: str, dims: tuple[int, ...] = (1,), **flags: bool) -> list[Tensor]:
    return [Tensor(name, dtype, dims, **flags) for name in names.split()]


_required, _scalars = partial(_many, optional=False), partial(_many, scalar=True)
_ragged = partial(_many, ragged=True)


def _parameters(inputs: Mapping[str, type], scalar: bool = False) -> list[Tensor]:
    """Inputs for sampling parameters, but for those of 64 bits. inputs: names with Python's types."""
    types = {bool: "BOOL", int: "INT32", float: "FP32"}
    names = [name for name in inputs if not name.endswith("seed")]
    return [Tensor(name, types[inputs[name]], scalar=scalar) for name in names]


LOGITS = "${logits_datatype}"
STATISTICS = [
    *_many("INT32", "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks"),
    *_many("INT64", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"),
    *_many("FP32", "acceptance_rate"),
    *_many("INT32", "total_accepted_draft_tokens total_draft_tokens"),
]
ADAPTERS_AND_GUIDES = [
    *_ragged("${lora_weights_data_type}", "lora_weights", (-1, -1)),
    *_ragged("INT32", "lora_config", (-1, -1)),
    *_ragged("STRING", "guided_decoding_guide_type guided_decoding_guide"),
    # Ours: for activated LoRA; an adapter by its name; several adapters together, or one with a scale.
    *_ragged("INT32", "lora_invocation_tokens", (-1,)),
    *_ragged("STRING", "lora_name lora_ckpt_source lora_version"),
    *_ragged("UINT64", "lora_mix_task_ids", (-1,)),
    *_ragged("STRING", "lora_mix_names", (-1,)),
    *_ragged("FP32", "lora_mix_scales", (-1,)),
]
RESULTS = [
    *_many("FP32", "cum_log_probs", (-1,)),
    *_many("FP32", "output_log_probs", (-1, -1)),
    *_many(LOGITS, "context_logits", (-1, -1)),
    *_many(LOGITS, "generation_logits", (-1, -1, -1)),
    *_many("INT32", "batch_index sequence_index"),
    *STATISTICS,
    *_many("STRING", "finish_reason lora_cache_tier lora_versions"),  # ours
]

PREPROCESSING = Model(
    inputs=(
        *_required("STRING", "QUERY"),
        *_required("INT32", "REQUEST_OUTPUT_LEN"),
        *_many("STRING", "DECODER_QUERY IMAGE_URL"),
        *_many("UINT8", "IMAGE_BYTES VIDEO_BYTES", (-1, -1, -1, -1)),
        *_many("STRING", "BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS", (-1,)),
        *_many("FP32", "EMBEDDING_BIAS_WEIGHTS", (-1,)),
        *_many("INT32", "END_ID PAD_ID"),
        *_many("UINT64", "PROMPT_TABLE_EXTRA_ID LORA_TASK_ID"),
        *_many("STRING", "LORA_NAME"),  # ours, as LORA_TASK_ID: the adapter whose tokenizer is used
    ),
    outputs=(
        *_many("INT32", "INPUT_ID DECODER_INPUT_ID REQUEST_OUTPUT_LEN", (-1,)),
        *_many("INT32", "REQUEST_INPUT_LEN REQUEST_DECODER_INPUT_LEN OUT_END_ID OUT_PAD_ID"),
        *_many("INT32", "BAD_WORDS_IDS STOP_WORDS_IDS", (2, -1)),
        *_many("FP32", "EMBEDDING_BIAS", (-1,)),
        *_many("UINT64", "OUT_PROMPT_TABLE_EXTRA_IDS", (-1,)),
        *_many("STRING", "OUT_SAMPLING_DEFAULTS"),  # ours: defaults of the adapter, as JSON
    ),
)

TENSORRT_LLM = Model(
    inputs=(
        *_scalars("INT32", "input_lengths request_output_len", optional=False),
        *_ragged("INT32", "input_ids draft_input_ids decoder_input_ids", (-1,)),
        *_scalars("INT32", "encoder_output_lengths decoder_input_lengths num_return_sequences beam_width"),
        *_scalars("INT32", "end_id pad_id runtime_top_p_reset_ids prompt_vocab_size"),
        *_scalars("UINT64", "random_seed lora_task_id"),
        *_scalars("BOOL", "return_log_probs return_context_logits return_generation_logits"),
        *_scalars("BOOL", "return_perf_metrics return_kv_cache_reuse_stats"),
        *_scalars("BOOL", "exclude_input_in_output stop streaming"),
        *_scalars("FP32", "draft_acceptance_threshold"),
        *_parameters({one.tensor: one.kind for one in PARAMETERS}, scalar=True),
        *ADAPTERS_AND_GUIDES,
        *_ragged("${encoder_input_features_data_type}", "encoder_input_features", (-1, -1)),
        *_ragged(LOGITS, "draft_logits", (-1, -1)),
        *_ragged("INT32", "stop_words_list bad_words_list", (2, -1)),
        *_ragged("FP32", "embedding_bias", (-1,)),
        *_ragged("FP16", "prompt_embedding_table", (-1, -1)),
        *_ragged("UINT64", "prompt_table_extra_ids", (-1,)),
        *_ragged("BOOL", "cross_attention_mask", (-1, -1)),
        *_ragged("BOOL", "skip_cross_attn_blocks"),
        *_ragged("UINT8", "context_phase_params", (-1,)),
        *_ragged("INT32", "retention_token_range_starts retention_token_range_ends", (-1,)),
        *_ragged("INT32", "retention_token_range_priorities retention_token_range_durations_ms", (-1,)),
        *_ragged("INT32", "retention_decode_priority retention_decode_duration_ms"),
        *_ragged("INT32", "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size"),
        *_many("FP32", "mrope_rotary_cos_sin", (-1,)),
        *_many("INT64", "mrope_position_deltas"),
        # Ours: JSON, for inputs that are not set; hidden states or labels instead of tokens.
        *_ragged("STRING", "sampling_defaults pooling"),
        *_scalars("BOOL", "classification_head"),
    ),
    outputs=(
        *_many("INT32", "output_ids", (-1, -1)),
        *_many("INT32", "sequence_length", (-1,)),
        *RESULTS,
        *_many("UINT8", "context_phase_params", (-1,)),
        # Ours, for stateless postprocessing: to stream exact text, to tell when the client has left, and the
        # adapter whose tokenizer is used.
        *_many("INT32", "previous_ids", (-1, -1)),
        *_many("INT64", "request_number"),
        *_many("STRING", "lora_text"),
        *_many("FP32", "pooled_output", (-1, -1)),
    ),
)

POSTPROCESSING = Model(
    inputs=(
        *_ragged("INT32", "TOKENS_BATCH", (-1, -1), optional=False),
        *_ragged("INT32", "SEQUENCE_LENGTH", (-1,), optional=False),
        *_ragged("INT32", "PREVIOUS_IDS", (-1, -1)),
        *_many("STRING", "FINISH_REASON"),
        *_many("INT64", "REQUEST_NUMBER"),
        *_ragged("STRING", "LORA_TEXT"),  # ours: the adapter whose tokenizer is used
    ),
    outputs=(Tensor("OUTPUT", "STRING", (-1,)),),
)

ENSEMBLE = Model(
    inputs=(
        *_required("STRING", "text_input"),
        *_required("INT32", "max_tokens"),
        *_many("STRING", "decoder_text_input"),
        *_many("STRING", "bad_words stop_words embedding_bias_words", (-1,)),
        *_many("FP32", "embedding_bias_weights", (-1,)),
        *_many("INT32", "num_return_sequences beam_width end_id pad_id prompt_vocab_size"),
        *_many("UINT64", "random_seed prompt_table_extra_id lora_task_id"),
        *_many("BOOL", "return_log_probs return_context_logits return_generation_logits"),
        *_many("BOOL", "return_perf_metrics return_kv_cache_reuse_stats exclude_input_in_output stream"),
        *_many("FP16", "prompt_embedding_table", (-1, -1)),
        *_parameters({one.text: one.kind for one in parameters_of("bls")}),
        *ADAPTERS_AND_GUIDES,
    ),
    outputs=(Tensor("text_output", "STRING", (-1,)), *RESULTS),
)

BLS_SCALARS = {
    "return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics",
    "return_kv_cache_reuse_stats", "num_return_sequences", "lora_task_id",
}  # fmt: skip
TENSORRT_LLM_BLS = Model(
    inputs=(
        *(replace(one, scalar=one.name in BLS_SCALARS) for one in ENSEMBLE.inputs),
        *_many("FP16", "image_input", (-1, 3, -1, -1)),
        *_many("UINT8", "image_bytes_input video_bytes_input", (-1, -1, -1, -1)),
        *_many("STRING", "image_url_input"),
        *_many("INT32", "num_draft_tokens min_tokens"),
        *_many("UINT64", "seed"),  # as min_tokens, a name in releases after 0.19
        *_scalars("BOOL", "use_draft_logits return_num_input_tokens return_num_output_tokens"),
    ),
    outputs=(*ENSEMBLE.outputs, *_many("INT32", "num_input_tokens num_output_tokens")),
)

VLLM_MODEL = Model(
    inputs=(
        *_many("STRING", "text_input sampling_parameters embedding_request"),
        *_many("STRING", "image", (-1,)),
        *_many("BOOL", "stream exclude_input_in_output return_finish_reason return_cumulative_logprob"),
        *_many("BOOL", "return_logprobs return_num_input_tokens return_num_output_tokens"),
    ),
    outputs=(
        *_many("STRING", "text_output finish_reason logprobs", (-1,)),
        *_many("FP32", "cumulative_logprob", (-1,)),
        *_many("UINT32", "num_input_tokens"),
        *_many("UINT32", "num_output_tokens", (-1,)),
    ),
)
"""vllm_backend's model."""

LLMAPI = Model(
    inputs=(
        *_required("STRING", "text_input", (-1,)),
        *_many("STRING", "image_url sampling_param_stop", (-1,)),
        *_many("INT32", "sampling_param_best_of sampling_param_max_tokens"),
        *_many("UINT64", "sampling_param_seed lora_id"),
        *_parameters({f"sampling_param_{one.name}": one.kind for one in parameters_of("llmapi")}),
        *_many("BOOL", "sampling_param_exclude_input_from_output sampling_param_return_perf_metrics"),
        *_many("BOOL", "streaming return_finish_reason return_stop_reason return_cumulative_logprob stop"),
        *_many("STRING", "sampling_param_logits_post_processor_name lora_name lora_path lora_ckpt_source"),
        *_many("STRING", "lora_mix_names", (-1,)),  # ours
        *_many("FP32", "lora_mix_scales", (-1,)),  # ours
    ),
    outputs=(
        *_many("STRING", "text_output finish_reason stop_reason", (-1,)),
        *_many("FP32", "cumulative_logprob kv_cache_hit_rate", (-1,)),
        *_many("INT32", "kv_cache_reused_block kv_cache_missed_block", (-1,)),
        *_many("INT32", "kv_cache_alloc_new_blocks kv_cache_alloc_total_blocks", (-1,)),
        *STATISTICS[3:],
    ),
)
"""TensorRT-LLM's `llmapi` model."""

MODELS = {
    "preprocessing": PREPROCESSING,
    "tensorrt_llm": TENSORRT_LLM,
    "postprocessing": POSTPROCESSING,
    "ensemble": ENSEMBLE,
    "tensorrt_llm_bls": TENSORRT_LLM_BLS,
    "vllm_model": VLLM_MODEL,
    "llmapi": LLMAPI,
}

REFUSED_INPUTS = (
    "encoder_input_features", "encoder_output_lengths", "draft_logits", "draft_acceptance_threshold",
    "cross_attention_mask", "mrope_rotary_cos_sin", "mrope_position_deltas", "context_phase_params",
    "skip_cross_attn_blocks", "lookahead_window_size", "lookahead_ngram_size",
    "lookahead_verification_set_size",
)  # fmt: skip
"""Inputs of `tensorrt_llm` for features that the engine lacks. Sending one is an error that names it."""

SAMPLING_SCALARS = {one.name: one.tensor for one in PARAMETERS} | {
    "top_p_reset_id": "runtime_top_p_reset_ids",
    "num_return_sequences": "num_return_sequences",
    "beam_width": "beam_width",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
}
"""Fields of SamplingConfig that are single values, with the `tensorrt_llm` inputs that carry them."""
