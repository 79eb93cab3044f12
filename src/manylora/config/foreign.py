"""Names of other programs' settings without a counterpart, and what each door says to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ForeignNames:
    """Of one door. ignored: without effect. accepted: values that change nothing; others are refused.
    refused: what to do instead. A name that is also in `accepted` is refused with other values only.
    """

    ignored: tuple[str, ...] = ()
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.ignored, *self.accepted, *self.refused)))

    def __contains__(self, name: str) -> bool:
        return name in self.ignored or name in self.accepted or name in self.refused

    def allows(self, name: str, value: Any) -> bool:
        """Whether a value has no effect here."""
        accepted = self.accepted.get(name, ())
        return name in self.ignored or value in accepted or str(value) in accepted


# Parameters of tensorrtllm_backend that would change answers.
TRITON = ForeignNames(
    accepted={
        "sink_token_length": ("0",),
        "decoding_mode": ("top_k", "top_p", "top_k_top_p", "beam_search", "auto"),
        "encoder_model_path": (),
        "guided_decoding_backend": ("xgrammar", "llguidance"),
    }
)

# Arguments of TensorRT-LLM's `LLM`. None is always accepted.
LLM = ForeignNames(
    accepted={
        "backend": ("pytorch",),
        "tokenizer_mode": ("auto",),
        "load_format": ("auto",),
        "context_parallel_size": (1,),
        "trust_remote_code": (True, False),
    }
)

# Fields of TensorRT-LLM's KvCacheConfig without a counterpart here.
KV_CACHE_CONFIG = ForeignNames(
    accepted={
        "max_attention_window": (None,),
        "sink_token_length": (None, 0),
        "cross_kv_cache_fraction": (None,),
        "event_buffer_max_size": (0,),
        "use_uvm": (False,),
        "dtype": ("auto", "fp8"),
    }
)

ONE_COPY = "one server runs one copy of the model; `manylora fleet` runs several"
CONFIG_JSON = "change config.json in a copy of the model's folder"
POOLING = "modules.json and 1_Pooling/config.json in the model's folder set the pooling"
KV_TOKENS = "kv_cache_config.max_tokens in --config bounds the KV cache"
KV_STORE = (
    "--kv-cache-host-memory-bytes 4G keeps KV blocks in host memory, --kv-disk-cache-dir FOLDER on disk"
)
TEXT_ONLY = "only text is served"
API_KEYS = "clients are identified by --api-keys"
BOTH_ROLES = "this server does both prefill and decode"

# Flags of `vllm serve` that take no value.
SERVE_SWITCHES = ForeignNames(
    ignored=(
        "enable_activated_lora", "enable_auto_tool_choice", "trust_remote_code", "disable_log_requests",
        "enable_log_requests", "disable_log_stats", "disable_uvicorn_access_log",
        "disable_frontend_multiprocessing", "disable_custom_all_reduce", "enable_request_id_headers",
        "enable_tokenizer_info_endpoint", "use_v2_block_manager", "async_scheduling", "fully_sharded_loras",
        "fail_fast_on_attention_window_too_large", "enable_reasoning",
    ),
    accepted={"enable_lora": (True,)},
)  # fmt: skip
# Flags of `vllm serve` and `trtllm-serve` with a value.
SERVE = ForeignNames(
    ignored=(
        "seed", "swap_space", "code_revision", "lora_extra_vocab_size", "max_seq_len_to_capture",
        "compilation_config", "attention_backend", "uvicorn_log_level", "max_log_len", "gpus_per_node",
        "num_postprocess_workers",
    ),
    accepted={
        "data_parallel_size": ("1",),
        "cluster_size": ("1",),
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
            "auto", "xgrammar", "guidance", "llguidance", "outlines", "lm-format-enforcer",
        ),
        "response_role": ("assistant",),
        "chat_template_content_format": ("auto", "string"),
        "cpu_offload_gb": ("0",),
        "kv_offloading_backend": ("native",),
        "max_logprobs": ("20",),
    },
    refused={
        "speculative_model": "drafts come from n-grams (--speculative-config), not from a draft model",
        "rope_scaling": CONFIG_JSON,
        "rope_theta": CONFIG_JSON,
        "hf_overrides": CONFIG_JSON,
        "pooler_config": POOLING,
        "override_pooler_config": POOLING,
        "default_chat_template_kwargs": "give chat_template_kwargs in requests",
        "limit_mm_per_prompt": TEXT_ONLY,
        "tool_parser_plugin": "--tool-call-parser lists the formats that are known",
        "enable_prompt_adapter": "PEFT folders of prompt tuning are served like any other adapter",
        "num_gpu_blocks_override": KV_TOKENS,
        "kv_cache_memory_bytes": KV_TOKENS,
        "kv_transfer_config": KV_STORE,
        "kv_offloading_size": KV_STORE,
        "root_path": "let the proxy strip its path prefix",
        "ssl_ca_certs": API_KEYS,
        "ssl_cert_reqs": API_KEYS,
        "middleware": "put a proxy in front",
        "nnodes": "start the same command on each host by torchrun or mpirun",
        "lora_target_modules": "lora_config.lora_target_modules in --config, with names such as attn_q",
        "fully_sharded": "adapters are always sharded over the ranks",
        "logits_processors": "use logit_bias and guided decoding in requests",
        "server_role": BOTH_ROLES,
        "metadata_server_config_file": BOTH_ROLES,
        "media_io_kwargs": TEXT_ONLY,
        "custom_tokenizer": "--tokenizer takes a folder with tokenizer.json",
        "return_tokens_as_token_ids": "ask for return_token_ids in requests",
    },
)  # fmt: skip
SERVE_VARIABLES = {
    "VLLM_API_KEY": "--api-key",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--allow-runtime-lora-updating",
    "VLLM_LOGGING_LEVEL": "--log-level",
}
"""Variables of vLLM without effect here, with the flag to give."""

# Options of `manylora serve` that cannot work behind a fleet.
FLEET = ForeignNames(
    refused={
        "triton_url": "it names one Triton, and each replica has an engine of its own: use manylora serve",
        "triton_model": "each replica has an engine of its own: use manylora serve with --triton-url",
        "enable_sleep_mode": "a request would reach only one replica: use manylora serve",
        "restart": "Ray starts replicas again that ended or were killed",
        "uds": "Ray's proxy listens on a port: give --host and --port",
    }
)

MODEL_CLASSES = "model classes of your own are not loaded"
# Flags of trtllm-build 0.17 to 0.20, and older ones that scripts still use.
TRTLLM_BUILD = ForeignNames(
    # About TensorRT's kernels or its builder, or always enabled here.
    ignored=(
        "bert_attention_plugin", "gpt_attention_plugin", "gemm_plugin", "gemm_swiglu_plugin", "nccl_plugin",
        "fp8_rowwise_gemm_plugin", "dora_plugin", "moe_plugin", "mamba_conv1d_plugin",
        "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin", "gemm_allreduce_plugin",
        "lookup_plugin", "context_fmha", "context_fmha_fp32_acc", "bert_context_fmha_fp32_acc",
        "use_paged_context_fmha", "use_fp8_context_fmha", "use_context_fmha_for_generation",
        "fuse_fp4_quant", "multiple_profiles", "paged_state", "paged_kv_cache", "remove_input_padding",
        "norm_quant_fusion", "reduce_fusion", "user_buffer", "use_fused_mlp", "pp_reduce_scatter",
        "use_custom_all_reduce", "multi_block_mode", "enable_xqa", "attention_qk_half_accumulation",
        "tokens_per_block", "opt_num_tokens", "max_encoder_input_len", "max_prompt_embedding_table_size",
        "max_multimodal_len", "max_draft_len", "logits_dtype", "gather_context_logits",
        "gather_generation_logits", "gather_all_token_logits", "strip_plan", "weight_sparsity",
        "weight_streaming", "fast_build", "input_timing_cache", "output_timing_cache",
        "profiling_verbosity", "log_level", "enable_debug_output", "visualize_network", "monitor_memory",
        "workers", "gpus_per_node", "cluster_key",
    ),
    accepted={
        "streamingllm": ("disable", "None"),
        "speculative_decoding_mode": ("draft_tokens_external",),
        "kv_cache_type": ("paged", "continuous"),
        "auto_parallel": ("1",),
    },
    refused={
        "streamingllm": "tokens are never dropped from the middle of a sequence",
        "speculative_decoding_mode": "drafts come with requests: draft_input_ids",
        "kv_cache_type": "generation needs a KV cache",
        "auto_parallel": "--tp_size and --pp_size say how many ranks serve the model",
        "dry_run": "nothing is built without being written",
        "model_config": "the config.json of --model_dir describes the model",
        "build_config": "give its limits as flags",
        "model_cls_file": MODEL_CLASSES,
        "model_cls_name": MODEL_CLASSES,
    },
)  # fmt: skip

TO_TRITON = ("model_control_mode", "load_model", "backend_config", "rate_limit", "strict_readiness")
ADAPTERS_FOLDER = "use --lora-root FOLDER, whose subfolders are adapters, or --set lora_names_file=FILE"
# Flags of launch_triton_server.py, tritonserver and other servers.
LAUNCHER = ForeignNames(
    refused={
        "host": "use --address",
        "port": "use --http_port, --grpc_port and --metrics_port",
        "model_repository": "use --model_repo=FOLDER",
        "model_store": "use --model_repo=FOLDER",
        "log_verbose": "use --log",
        **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size"), "use --world_size=N"),
        **{
            flag: f"pass it to tritonserver: --triton-arg=--{flag.replace('_', '-')}=VALUE"
            for flag in TO_TRITON
        },
    }
)
# Flags of launch_triton_server.py that are parsed and then refused with this text.
LAUNCH_SCRIPT = ForeignNames(
    refused={
        "multi_model": "--multi-model: one server serves one base model; start another on other ports",
        "disable_spawn_processes": "--disable-spawn-processes belongs to --multi-model, "
        "which is not available",
        "oversubscribe": "--oversubscribe is an option of mpirun, which is not used",
        "trtllm_llmapi_launch": "--trtllm_llmapi_launch starts a process for each GPU by MPI: leave it out, "
        "the engine starts those of its host",
        "multimodal_gpu0_cuda_mem_pool_bytes": "--multimodal_gpu0_cuda_mem_pool_bytes: no multimodal models",
    }
)
# Flags of other servers for `manylora triton`, besides the launcher's.
TRITON_COMMAND = {
    "config": "use --set NAME=VALUE for each setting",
    "gpu_memory_utilization": "use --set kv_cache_free_gpu_mem_fraction=VALUE",
    "lora_modules": ADAPTERS_FOLDER,
    "max_batch_size": "use --set max_num_sequences=N for one step, triton_max_batch_size=N for one request",
    "max_model_len": "use --set max_seq_len=N",
    "max_num_seqs": "use --set max_num_sequences=N",
    "max_num_batched_tokens": "use --set max_num_tokens=N",
    "tokenizer": "use --set tokenizer_dir=FOLDER",
}

MEASURE_SERVER = "to measure a running server, use aiperf or guidellm (docs/benchmarks.md shows how)"
WRITE_DATASET = "write a dataset with manylora prepare-dataset, and give it with --dataset"
# Commands and flags of trtllm-bench and `vllm bench`.
BENCH = {
    "serve": MEASURE_SERVER,
    "low_latency": "it is called latency here",
    "build": "nothing has to be built; manylora build quantises a model",
    **dict.fromkeys(("base_url", "endpoint", "host", "port", "request_rate", "url"), MEASURE_SERVER),
    **dict.fromkeys(("dataset_name", "dataset_path"), WRITE_DATASET),
    **dict.fromkeys(("input_len", "output_len", "random_input_len", "random_output_len"), WRITE_DATASET),
    "num_prompts": "use --num_requests",
    "max_concurrency": "use --concurrency",
    "max_model_len": "use --max_seq_len",
    **dict.fromkeys(("lora_dir", "lora_path"), "name adapters in the dataset: see prepare-dataset"),
    "result_filename": "use --report_json FILE",
    "save_result": "use --report_json FILE",
    "tokenizer": "the tokenizer of --model is used",
}
