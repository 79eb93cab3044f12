"""The flags of trtllm-build that `manylora build` does not share.

The flags of TensorRT-LLM 0.17 to 0.20, and older ones that scripts still use.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence

from manylora.errors import ConfigError

DISABLED = ("disable", "None")
# About TensorRT's kernels or its builder, or always enabled here.
WITHOUT_EFFECT = (
    "bert_attention_plugin", "gpt_attention_plugin", "gemm_plugin", "gemm_swiglu_plugin", "nccl_plugin",
    "fp8_rowwise_gemm_plugin", "dora_plugin", "moe_plugin", "mamba_conv1d_plugin", "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin", "gemm_allreduce_plugin", "lookup_plugin", "context_fmha",
    "context_fmha_fp32_acc", "bert_context_fmha_fp32_acc", "use_paged_context_fmha", "use_fp8_context_fmha",
    "use_context_fmha_for_generation", "fuse_fp4_quant", "multiple_profiles", "paged_state", "paged_kv_cache",
    "remove_input_padding", "norm_quant_fusion", "reduce_fusion", "user_buffer", "use_fused_mlp",
    "pp_reduce_scatter", "use_custom_all_reduce", "multi_block_mode", "enable_xqa",
    "attention_qk_half_accumulation", "tokens_per_block", "opt_num_tokens", "max_encoder_input_len",
    "max_prompt_embedding_table_size", "max_multimodal_len", "max_draft_len", "logits_dtype",
    "gather_context_logits", "gather_generation_logits", "gather_all_token_logits", "strip_plan",
    "weight_sparsity", "weight_streaming", "fast_build", "input_timing_cache", "output_timing_cache",
    "profiling_verbosity", "log_level", "enable_debug_output", "visualize_network", "monitor_memory",
    "workers", "gpus_per_node", "cluster_key",
)  # fmt: skip
# Flag -> values that change nothing, and why other values are refused.
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "streamingllm": (DISABLED, "tokens are never dropped from the middle of a sequence"),
    "speculative_decoding_mode": (("draft_tokens_external",), "drafts come with requests: draft_input_ids"),
    "kv_cache_type": (("paged", "continuous"), "generation needs a KV cache"),
    "auto_parallel": (("1",), "--tp_size and --pp_size say how many ranks serve the model"),
    "dry_run": ((), "nothing is built without being written"),
    "model_config": ((), "the config.json of --model_dir describes the model"),
    "build_config": ((), "give its limits as flags"),
    "model_cls_file": ((), "model classes of your own are not loaded"),
    "model_cls_name": ((), "model classes of your own are not loaded"),
}
WITH_MEANING = ("lora_plugin", "max_input_len")


def help_text() -> str:
    listed = {
        "taken": WITH_MEANING,
        "refused unless they change nothing": REFUSED,
        "without effect": WITHOUT_EFFECT,
    }
    return "With --trtllm-flags: " + ". ".join(
        f"{what}: {' '.join(f'--{name}' for name in names)}" for what, names in listed.items()
    )


def take_flags(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Split arguments into the trtllm-build flags among them, with their values, and the rest."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in (*WITHOUT_EFFECT, *REFUSED, *WITH_MEANING):
        parser.add_argument(f"--{name}", nargs="?", const="", default=SUPPRESS)
    return parser.parse_known_args(arguments)


def check_flags(given: Namespace, wanted: bool) -> None:
    """wanted: whether these flags are accepted at all. Raises ConfigError naming those that are not."""
    names = [f"--{name}" for name in vars(given)]
    if names and not wanted:
        raise ConfigError(
            f"leave out {', '.join(names)}, which trtllm-build takes for its engines, or add --trtllm-flags "
            "to take what has a meaning here"
        )
    for name, value in vars(given).items():
        harmless, reason = REFUSED.get(name, ((value,), ""))
        if value not in harmless:
            raise ConfigError(f"{f'--{name} {value}'.strip()} cannot be had: {reason}; leave it out")


def enables_lora(given: Namespace) -> bool | None:
    """Whether --lora_plugin enables LoRA. None if it was not given."""
    return given.lora_plugin not in DISABLED if hasattr(given, "lora_plugin") else None


def max_input_len(given: Namespace) -> int | None:
    """The limit in tokens. Raises ConfigError."""
    text = getattr(given, "max_input_len", None)
    if text is not None and not text.isdecimal():
        raise ConfigError(f"--max_input_len must be a whole number, got {text or 'none'}")
    return None if text is None else int(text)


def without_effect(given: Namespace) -> str:
    """A line that names the flags without effect. Empty if there are none."""
    names = [f"--{name}" for name in vars(given) if name != "lora_plugin"]
    return f"without effect here: {', '.join(names)}" if names else ""
