"""Every tensor of the models as one table: tensorrtllm_backend v0.19, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from manylora.generation.sampling import PARAMETERS, parameters_of


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


def _with_parameters(model: Model, inputs: Mapping[str, type]) -> Model:
    """The model with those inputs of sampling parameters that it lacks. inputs: names with Python's types."""
    scalar = any(tensor.scalar for tensor in model.inputs)
    known = {tensor.name for tensor in model.inputs}
    more = [Tensor(name, DTYPES[one], scalar=scalar) for name, one in inputs.items() if name not in known]
    return replace(model, inputs=(*model.inputs, *more))


DTYPES = {bool: "BOOL", int: "INT32", float: "FP32"}
LOGITS = "${logits_datatype}"
STATISTICS = [
    *_many("INT32", "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks"),
    *_many("INT64", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"),
    *_many("FP32", "acceptance_rate"),
    *_many("INT32", "total_accepted_draft_tokens total_draft_tokens"),
]
LORA = [
    Tensor("lora_weights", "${lora_weights_data_type}", (-1, -1), ragged=True),
    Tensor("lora_config", "INT32", (-1, -1), ragged=True),
    Tensor("lora_invocation_tokens", "INT32", (-1,), ragged=True),  # ours: for activated LoRA
]
GUIDES = _many("STRING", "guided_decoding_guide_type guided_decoding_guide", ragged=True)
CATALOG = _many("STRING", "lora_name lora_ckpt_source", ragged=True)  # ours: an adapter by its name
MIX = [  # ours: several adapters together, or one with a scale
    Tensor("lora_mix_task_ids", "UINT64", (-1,), ragged=True),
    Tensor("lora_mix_names", "STRING", (-1,), ragged=True),
    Tensor("lora_mix_scales", "FP32", (-1,), ragged=True),
]
VERSION = _many("STRING", "lora_version", ragged=True)  # ours
REASON_AND_TIER = _many("STRING", "finish_reason lora_cache_tier lora_versions")  # ours
RESULTS = [
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("context_logits", LOGITS, (-1, -1)),
    Tensor("generation_logits", LOGITS, (-1, -1, -1)),
    Tensor("batch_index", "INT32"),
    Tensor("sequence_index", "INT32"),
]

PREPROCESSING = Model(
    inputs=(
        Tensor("QUERY", "STRING", optional=False),
        Tensor("DECODER_QUERY", "STRING"),
        *_many("UINT8", "IMAGE_BYTES", (-1, -1, -1, -1)),
        Tensor("IMAGE_URL", "STRING"),
        *_many("UINT8", "VIDEO_BYTES", (-1, -1, -1, -1)),
        Tensor("REQUEST_OUTPUT_LEN", "INT32", optional=False),
        *_many("STRING", "BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS", (-1,)),
        Tensor("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,)),
        *_many("INT32", "END_ID PAD_ID"),
        Tensor("PROMPT_TABLE_EXTRA_ID", "UINT64"),
        *_many("UINT64", "LORA_TASK_ID"),  # ours: the adapter whose tokenizer is used
        *_many("STRING", "LORA_NAME"),
    ),
    outputs=(
        Tensor("INPUT_ID", "INT32", (-1,)),
        Tensor("REQUEST_INPUT_LEN", "INT32"),
        Tensor("DECODER_INPUT_ID", "INT32", (-1,)),
        Tensor("REQUEST_DECODER_INPUT_LEN", "INT32"),
        *_many("INT32", "BAD_WORDS_IDS STOP_WORDS_IDS", (2, -1)),
        Tensor("EMBEDDING_BIAS", "FP32", (-1,)),
        Tensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
        *_many("INT32", "OUT_END_ID OUT_PAD_ID"),
        Tensor("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", (-1,)),
        Tensor("OUT_SAMPLING_DEFAULTS", "STRING"),  # ours: defaults of the adapter, as JSON
    ),
)

TENSORRT_LLM = _with_parameters(
    Model(
        inputs=(
            Tensor("input_ids", "INT32", (-1,), ragged=True),
            Tensor("encoder_input_features", "${encoder_input_features_data_type}", (-1, -1), ragged=True),
            Tensor("encoder_output_lengths", "INT32", scalar=True),
            *_many("INT32", "input_lengths request_output_len", optional=False, scalar=True),
            Tensor("num_return_sequences", "INT32", scalar=True),
            *_many("INT32", "draft_input_ids decoder_input_ids", (-1,), ragged=True),
            Tensor("decoder_input_lengths", "INT32", scalar=True),
            Tensor("draft_logits", LOGITS, (-1, -1), ragged=True),
            Tensor("draft_acceptance_threshold", "FP32", scalar=True),
            *_many("INT32", "end_id pad_id", scalar=True),
            *_many("INT32", "stop_words_list bad_words_list", (2, -1), ragged=True),
            Tensor("embedding_bias", "FP32", (-1,), ragged=True),
            Tensor("beam_width", "INT32", scalar=True),
            Tensor("temperature", "FP32", scalar=True),
            Tensor("runtime_top_k", "INT32", scalar=True),
            *_many("FP32", "runtime_top_p runtime_top_p_min runtime_top_p_decay", scalar=True),
            Tensor("runtime_top_p_reset_ids", "INT32", scalar=True),
            Tensor("min_p", "FP32", scalar=True),  # ours
            Tensor("use_drafts", "BOOL", scalar=True),  # ours
            Tensor("sampling_defaults", "STRING", ragged=True),  # ours: JSON, for inputs that are not set
            Tensor("len_penalty", "FP32", scalar=True),
            Tensor("early_stopping", "BOOL", scalar=True),
            Tensor("repetition_penalty", "FP32", scalar=True),
            Tensor("min_length", "INT32", scalar=True),
            *_many("FP32", "beam_search_diversity_rate presence_penalty frequency_penalty", scalar=True),
            Tensor("prompt_ignore_length", "INT32", scalar=True),  # upstream since May 2026
            Tensor("random_seed", "UINT64", scalar=True),
            *_many("BOOL", "return_log_probs return_context_logits return_generation_logits", scalar=True),
            *_many("BOOL", "return_perf_metrics return_kv_cache_reuse_stats", scalar=True),
            *_many("BOOL", "exclude_input_in_output stop streaming", scalar=True),
            Tensor("prompt_embedding_table", "FP16", (-1, -1), ragged=True),
            Tensor("prompt_table_extra_ids", "UINT64", (-1,), ragged=True),
            Tensor("prompt_vocab_size", "INT32", scalar=True),
            Tensor("cross_attention_mask", "BOOL", (-1, -1), ragged=True),
            Tensor("mrope_rotary_cos_sin", "FP32", (-1,)),
            Tensor("mrope_position_deltas", "INT64"),
            Tensor("lora_task_id", "UINT64", scalar=True),
            *LORA,
            *CATALOG,
            *MIX,
            *VERSION,
            Tensor("context_phase_params", "UINT8", (-1,), ragged=True),
            Tensor("skip_cross_attn_blocks", "BOOL", ragged=True),
            *_many(
                "INT32",
                "retention_token_range_starts retention_token_range_ends retention_token_range_priorities "
                "retention_token_range_durations_ms",
                (-1,),
                ragged=True,
            ),
            *_many("INT32", "retention_decode_priority retention_decode_duration_ms", ragged=True),
            *GUIDES,
            # Ours: hidden states or labels instead of tokens.
            *_many("STRING", "pooling", ragged=True),
            Tensor("classification_head", "BOOL", scalar=True),
            *_many(
                "INT32",
                "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size",
                ragged=True,
            ),
        ),
        outputs=(
            Tensor("output_ids", "INT32", (-1, -1)),
            Tensor("sequence_length", "INT32", (-1,)),
            *RESULTS,
            Tensor("context_phase_params", "UINT8", (-1,)),
            *STATISTICS,
            # Ours: stateless postprocessing needs this to stream exact text.
            Tensor("previous_ids", "INT32", (-1, -1)),
            Tensor("request_number", "INT64"),  # returned when the client has left
            *REASON_AND_TIER,
            Tensor("pooled_output", "FP32", (-1, -1)),
            Tensor("lora_text", "STRING"),  # for postprocessing, which only sees this model's outputs
        ),
    ),
    {one.tensor: one.kind for one in PARAMETERS},
)

POSTPROCESSING = Model(
    inputs=(
        Tensor("TOKENS_BATCH", "INT32", (-1, -1), optional=False, ragged=True),
        Tensor("SEQUENCE_LENGTH", "INT32", (-1,), optional=False, ragged=True),
        Tensor("PREVIOUS_IDS", "INT32", (-1, -1), ragged=True),
        Tensor("FINISH_REASON", "STRING"),
        Tensor("REQUEST_NUMBER", "INT64"),
        Tensor("LORA_TEXT", "STRING", ragged=True),  # ours: the adapter whose tokenizer is used
    ),
    outputs=(Tensor("OUTPUT", "STRING", (-1,)),),
)

ENSEMBLE = _with_parameters(
    Model(
        inputs=(
            Tensor("text_input", "STRING", optional=False),
            Tensor("decoder_text_input", "STRING"),
            Tensor("max_tokens", "INT32", optional=False),
            Tensor("num_return_sequences", "INT32"),
            *_many("STRING", "bad_words stop_words", (-1,)),
            Tensor("exclude_input_in_output", "BOOL"),
            *_many("INT32", "end_id pad_id top_k"),
            *_many("FP32", "top_p temperature length_penalty repetition_penalty"),
            Tensor("min_length", "INT32"),
            *_many("FP32", "presence_penalty frequency_penalty"),
            Tensor("prompt_ignore_length", "INT32"),
            Tensor("random_seed", "UINT64"),
            *_many("BOOL", "return_log_probs return_context_logits return_generation_logits"),
            *_many("BOOL", "return_perf_metrics return_kv_cache_reuse_stats"),
            Tensor("beam_width", "INT32"),
            Tensor("stream", "BOOL"),
            Tensor("prompt_embedding_table", "FP16", (-1, -1)),
            Tensor("prompt_table_extra_id", "UINT64"),
            Tensor("prompt_vocab_size", "INT32"),
            Tensor("embedding_bias_words", "STRING", (-1,)),
            Tensor("embedding_bias_weights", "FP32", (-1,)),
            Tensor("lora_task_id", "UINT64"),
            *LORA,
            *CATALOG,
            *MIX,
            *VERSION,
            *GUIDES,
        ),
        outputs=(Tensor("text_output", "STRING", (-1,)), *RESULTS, *STATISTICS, *REASON_AND_TIER),
    ),
    {one.text: one.kind for one in parameters_of("bls")},
)

ENSEMBLE_OUTPUTS = ENSEMBLE.outputs

BLS_SCALARS = {
    "return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics",
    "return_kv_cache_reuse_stats", "num_return_sequences", "lora_task_id",
}  # fmt: skip
TENSORRT_LLM_BLS = Model(
    inputs=(
        *(replace(t, scalar=t.name in BLS_SCALARS) for t in ENSEMBLE.inputs),
        Tensor("image_input", "FP16", (-1, 3, -1, -1)),
        *_many("UINT8", "image_bytes_input video_bytes_input", (-1, -1, -1, -1)),
        Tensor("image_url_input", "STRING"),
        Tensor("num_draft_tokens", "INT32"),
        Tensor("use_draft_logits", "BOOL", scalar=True),
        *_many("BOOL", "return_num_input_tokens return_num_output_tokens", scalar=True),
        Tensor("seed", "UINT64"),  # names of random_seed and min_length in releases after 0.19
        Tensor("min_tokens", "INT32"),
    ),
    outputs=(*ENSEMBLE.outputs, *_many("INT32", "num_input_tokens num_output_tokens")),
)

VLLM_MODEL = Model(
    inputs=(
        Tensor("text_input", "STRING"),
        Tensor("image", "STRING", (-1,)),
        Tensor("stream", "BOOL"),
        Tensor("sampling_parameters", "STRING"),
        Tensor("exclude_input_in_output", "BOOL"),
        *_many("BOOL", "return_finish_reason return_cumulative_logprob return_logprobs"),
        *_many("BOOL", "return_num_input_tokens return_num_output_tokens"),
        Tensor("embedding_request", "STRING"),
    ),
    outputs=(
        *_many("STRING", "text_output finish_reason", (-1,)),
        Tensor("cumulative_logprob", "FP32", (-1,)),
        Tensor("logprobs", "STRING", (-1,)),
        Tensor("num_input_tokens", "UINT32"),
        Tensor("num_output_tokens", "UINT32", (-1,)),
    ),
)
"""vllm_backend's model."""

LLMAPI = _with_parameters(
    Model(
        inputs=(
            Tensor("text_input", "STRING", (-1,), optional=False),
            Tensor("image_url", "STRING", (-1,)),
            Tensor("streaming", "BOOL"),
            Tensor("sampling_param_best_of", "INT32"),
            Tensor("sampling_param_temperature", "FP32"),
            Tensor("sampling_param_top_k", "INT32"),
            *_many("FP32", "sampling_param_top_p sampling_param_frequency_penalty"),
            Tensor("sampling_param_presence_penalty", "FP32"),
            Tensor("sampling_param_max_tokens", "INT32"),
            Tensor("sampling_param_stop", "STRING", (-1,)),
            Tensor("sampling_param_seed", "UINT64"),
            *_many("BOOL", "sampling_param_exclude_input_from_output sampling_param_return_perf_metrics"),
            Tensor("sampling_param_logits_post_processor_name", "STRING"),
            *_many("BOOL", "return_finish_reason return_stop_reason return_cumulative_logprob stop"),
            Tensor("lora_id", "UINT64"),
            *_many("STRING", "lora_name lora_path lora_ckpt_source"),
            *(replace(tensor, ragged=False) for tensor in MIX[1:]),  # ours
        ),
        outputs=(
            *_many("STRING", "text_output finish_reason stop_reason", (-1,)),
            Tensor("cumulative_logprob", "FP32", (-1,)),
            *_many("INT32", "kv_cache_reused_block kv_cache_missed_block kv_cache_alloc_new_blocks", (-1,)),
            Tensor("kv_cache_alloc_total_blocks", "INT32", (-1,)),
            Tensor("kv_cache_hit_rate", "FP32", (-1,)),
            *STATISTICS[3:],
        ),
    ),
    {f"sampling_param_{one.name}": one.kind for one in parameters_of("llmapi")},
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
    **{
        name: name
        for name in (
            "num_return_sequences", "beam_width", "return_log_probs", "return_context_logits",
            "return_generation_logits",
        )
    },
}  # fmt: skip
"""Fields of SamplingConfig that are single values, with the `tensorrt_llm` inputs that carry them."""
