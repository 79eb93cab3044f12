"""Flags of `vllm serve` and `trtllm-serve` and keys of their option files, and what each means here.

Flags that only have another name here are in ALIASES of `options`. This module has the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from manylora.errors import ConfigError
from manylora.llmapi.options import OTHER_NAMES


def json_object(text: str) -> dict[str, Any]:
    """Raises ArgumentTypeError."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:200]!r}")
    return found


# Options that set a field in the arguments of `LLM`: type, PART.FIELD, and the text for --help.
FIELDS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "max_loras": (
        int,
        OTHER_NAMES["max_loras"],
        "number of adapters at the rank limit that fit on the device",
    ),
    "max_cpu_loras": (
        int,
        OTHER_NAMES["max_cpu_loras"],
        "number of adapters at the rank limit in host memory",
    ),
    "max_lora_rank": (int, OTHER_NAMES["max_lora_rank"], "maximum rank of an adapter"),
    "lora_dtype": (str, OTHER_NAMES["lora_dtype"], "dtype of adapters in memory"),
    "enable_prefix_caching": (
        bool,
        OTHER_NAMES["enable_prefix_caching"],
        "share KV blocks of equal prompt prefixes",
    ),
    "block_size": (int, OTHER_NAMES["block_size"], "tokens in a block of the KV cache"),
    "kv_cache_dtype": (str, OTHER_NAMES["kv_cache_dtype"], "auto, or fp8"),
    "enforce_eager": (bool, OTHER_NAMES["enforce_eager"], "no CUDA graphs"),
    "max_beam_width": (int, "max_beam_width", "maximum number of beams of one request"),
    "stream_interval": (int, "stream_interval", "new tokens per streamed event"),
    "tensor_parallel_size": (int, "tensor_parallel_size", "number of ranks that share each layer"),
    "tp_size": (int, "tensor_parallel_size", "the same"),
    "pipeline_parallel_size": (int, "pipeline_parallel_size", "number of pipeline stages"),
    "pp_size": (int, "pipeline_parallel_size", "the same"),
    "ep_size": (int, "moe_expert_parallel_size", "number of expert-parallel groups of ranks"),
    "enable_expert_parallel": (bool, "moe_expert_parallel_size", "divide whole experts among the ranks"),
    "kv_cache_free_gpu_memory_fraction": (
        float,
        OTHER_NAMES["kv_cache_free_gpu_memory_fraction"],
        "share of the memory left after the weights",
    ),
    "speculative_config": (json_object, "speculative_config", "n-gram drafts, as JSON"),
}
# Values with another name here. enforce_eager true means no CUDA graphs.
VALUES: dict[str, dict[Any, Any]] = {
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "bfloat16": "auto", "float16": "auto"},
    "enforce_eager": {True: False, False: None},
}
# Errors of the engine name Triton's parameters. What they are called here:
ENGINE_NAMES = {
    "lora_cache_host_memory_bytes": "--max-cpu-loras (host_cache_size of peft_cache_config in --config)",
    "lora_cache_gpu_memory_fraction": "--max-loras (device_cache_percent of peft_cache_config in --config)",
    "lora_cache_max_adapter_size": "--max-lora-rank",
    "lora_target_modules": "modules in lora_target_modules of lora_config in --config",
    "kv_cache_free_gpu_mem_fraction": "--kv-cache-free-gpu-memory-fraction",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "tokens_per_block": "--block-size",
    "max_beam_width": "--max-beam-width",
    "max_num_tokens": "--max-num-tokens",
    "max_batch_size": "--max-batch-size",
    "max_seq_len": "--max-seq-len",
}
DTYPES = {"half": "float16", "float": "float32"}
# Without effect here, with the values that are accepted. Empty: any value.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "enable_lora": (True,),
    "enable_activated_lora": (),
    "enable_auto_tool_choice": (),
    "trust_remote_code": (),
    "disable_log_requests": (),
    "enable_log_requests": (),
    "disable_log_stats": (),
    "disable_uvicorn_access_log": (),
    "disable_frontend_multiprocessing": (),
    "disable_custom_all_reduce": (),
    "enable_request_id_headers": (),
    "enable_tokenizer_info_endpoint": (),
    "use_v2_block_manager": (),
    "async_scheduling": (),
    "fully_sharded_loras": (),
    "fail_fast_on_attention_window_too_large": (),
}
ONLY_ONE = (
    "data_parallel_size",
    "cluster_size",
)
NEUTRAL_VALUES: dict[str, tuple[str, ...]] = {
    # Tool calls are found in all of these formats.
    "tool_call_parser": (
        "hermes",
        "llama3_json",
        "llama4_json",
        "mistral",
        "qwen25",
    ),
    "tool_parser": ("qwen3",),
    **dict.fromkeys(ONLY_ONE, ("1",)),
    "backend": ("pytorch",),
    "distributed_executor_backend": ("mp", "uni", "ray", "external_launcher"),
    # Every server handles all kinds of requests.
    "task": ("auto", "generate", "embed", "embedding", "classify", "score", "reward"),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed", "classify"),
    "load_format": ("auto", "safetensors"),
    "config_format": ("auto", "hf"),
    "tokenizer_mode": ("auto", "hf"),
    "model_impl": ("auto", "vllm"),
    "guided_decoding_backend": (
        "auto",
        "xgrammar",
        "guidance",
        "llguidance",
        "outlines",
        "lm-format-enforcer",
    ),
    "response_role": ("assistant",),
    "chat_template_content_format": ("auto", "string"),
    "scheduling_policy": ("fcfs",),
    "cpu_offload_gb": ("0",),
    "max_logprobs": ("20",),
    "seed": (),
    "swap_space": (),
    "code_revision": (),
    "lora_extra_vocab_size": (),
    "max_seq_len_to_capture": (),
    "compilation_config": (),
    "attention_backend": (),
    "uvicorn_log_level": (),
    "max_log_len": (),
    "gpus_per_node": (),
    "num_postprocess_workers": (),
}
ONE_COPY = "one server runs one copy of the model; `manylora fleet` runs several"

CHECKPOINT = (
    "the checkpoint's own quantisation is detected; to quantise plain weights use quant_config in --config"
)
CONFIG = "change config.json in a copy of the model's folder"
REFUSED: dict[str, str] = {
    "quantization": CHECKPOINT,
    "speculative_model": "drafts come from n-grams (--speculative-config), not from a draft model",
    "rope_scaling": CONFIG,
    "rope_theta": CONFIG,
    "hf_overrides": CONFIG,
    "pooler_config": "modules.json and 1_Pooling/config.json in the model's folder set the pooling",
    "override_pooler_config": "modules.json and 1_Pooling/config.json in the model's folder set the pooling",
    "default_chat_template_kwargs": "give chat_template_kwargs in requests",
    "limit_mm_per_prompt": "only text is served",
    "reasoning_parser": "reasoning stays in the text of the output",
    "enable_reasoning": "reasoning stays in the text of the output",
    "tool_parser_plugin": "tool calls of Hermes, Llama 3, Mistral and Qwen are parsed without a plugin",
    "enable_prompt_adapter": "PEFT folders of prompt tuning are served like any other adapter",
    "num_gpu_blocks_override": "kv_cache_config.max_tokens in --config bounds the KV cache",
    "kv_cache_memory_bytes": "kv_cache_config.max_tokens in --config bounds the KV cache",
    "kv_transfer_config": "the KV cache stays in one process",
    "uds": "give --host and --port",
    "root_path": "let the proxy strip its path prefix",
    "allowed_origins": "give --allowed-hosts, whose pages may use this server",
    "allowed_methods": "give --allowed-hosts, whose pages may use this server",
    "allowed_headers": "give --allowed-hosts, whose pages may use this server",
    "allow_credentials": "give --allowed-hosts, whose pages may use this server",
    "ssl_ca_certs": "clients are identified by --api-keys",
    "ssl_cert_reqs": "clients are identified by --api-keys",
    "middleware": "put a proxy in front",
    "nnodes": "start the same command on each host by torchrun or mpirun",
    "enable_sleep_mode": "stop the server, and start it again",
    "lora_target_modules": "lora_config.lora_target_modules in --config, with names such as attn_q",
    "fully_sharded": "adapters are always sharded over the ranks",
    "logits_processors": "use logit_bias and guided decoding in requests",
    "server_role": "this server does both prefill and decode",
    "metadata_server_config_file": "this server does both prefill and decode",
    "otlp_traces_endpoint": "there is no tracing; /metrics has latencies",
    "media_io_kwargs": "only text is served",
    "custom_tokenizer": "--tokenizer takes a folder with tokenizer.json",
    "return_tokens_as_token_ids": "ask for return_token_ids in requests",
}
# Variables of vLLM without effect here, with the flag to give.
VARIABLES = {
    "VLLM_API_KEY": "--api-key",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--allow-runtime-lora-updating",
    "VLLM_LOGGING_LEVEL": "--log-level",
}
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}


def take(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """given: values by name, with underscores. Returns the remaining values, and fields of the arguments of
    `LLM` by PART.FIELD. Raises ConfigError for what is not available here, with what to use instead.
    """
    left, found = _divide_experts(given), dict[str, Any]()
    for name in list(left):
        if name in REFUSED:
            raise ConfigError(f"--{name.replace('_', '-')} is not taken here: {REFUSED[name]}")
        if name in NEUTRAL or name in NEUTRAL_VALUES:
            _check_neutral(name, left.pop(name))
        elif name in FIELDS:
            value = left.pop(name)
            value = VALUES[name].get(value, value) if name in VALUES else value
            if value is not None:
                found[FIELDS[name][1]] = value
    if left.get("dtype") in DTYPES:
        left["dtype"] = DTYPES[left["dtype"]]
    return left, found


def _divide_experts(given: Mapping[str, Any]) -> dict[str, Any]:
    """given, with vLLM's flag translated to the other one: one group of experts per tensor-parallel rank.
    Raises ConfigError.
    """
    given = dict(given)
    if not given.pop("enable_expert_parallel", False):
        return given
    ranks = given.get("tensor_parallel_size") or given.get("tp_size")
    if ranks is None:
        raise ConfigError(
            "--enable-expert-parallel divides experts among the ranks of --tensor-parallel-size: give both"
        )
    asked = given.setdefault("ep_size", ranks)
    if asked != ranks:
        raise ConfigError(f"--enable-expert-parallel means --ep-size {ranks}, got {asked}: give one of them")
    return given


def _check_neutral(name: str, value: Any) -> None:
    allowed = NEUTRAL.get(name) or NEUTRAL_VALUES.get(name) or ()
    if not allowed or value in allowed or str(value) in allowed:
        return
    flag = f"--{name.replace('_', '-')}"
    if name in ONLY_ONE:
        raise ConfigError(f"{flag} must be 1, got {value}: {ONE_COPY}")
    if name == "enable_lora":
        raise ConfigError("adapters are always served: leave --no-enable-lora out")
    raise ConfigError(f"{flag} {value} has no counterpart here: leave it out, or give {' or '.join(allowed)}")
