"""build_parts: reads the model, opens the device, loads weights, divides the memory between the caches."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from manylora.config.build_record import weights_algo
from manylora.config.engine import EngineConfig, LoraCacheConfig, ModelConfig
from manylora.engine.guide import Guides
from manylora.engine.memory import (
    KvPlan,
    adapter_room,
    allocate_kv,
    batch_limits,
    check_length,
    kv_cache_dtype,
    plan_kv,
    usable_bytes,
    with_room,
)
from manylora.engine.peak import peak_bytes
from manylora.engine.runner import Runner
from manylora.kernels.device import Device, open_device
from manylora.lora.expert_rules import targets_beside_quantised_experts
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.store import AdapterStore
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.model.effective_weights import EffectiveWeights
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.model.weights import adapter_dtype, compute_dtype, load_decoder
from manylora.system.allocator import keep_memory

logger = logging.getLogger("manylora")

DEFAULT_NUM_GRAPHS = 128


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine.

    base:    the checkpoint's weights, which adapters on disk are read against (DoRA, trained biases).
    guides:  compiles guides; None when guided decoding is not enabled.
    overlap: whether a step is launched before the tokens of the previous one are known.
    """

    model: ModelConfig
    device: Device
    decoder: Decoder | EncoderDecoder
    kv_plan: KvPlan
    base: BaseWeights
    adapters: AdapterStore
    runner: Runner
    guides: Guides | None
    overlap: bool


def build_parts(config: EngineConfig) -> EngineParts:
    """Raises ConfigError when the configuration, the checkpoint or the memory does not allow it."""
    started = time.perf_counter()
    model, device = read_model_config(config.model_dir), open_device(config.device)
    check_length(config, model)
    if device.torch.type == "cpu":
        keep_memory()
    before = device.free_bytes()
    dtype = compute_dtype(config.dtype, model, device)
    decoder = load_decoder(config.model_dir, model, dtype, device, config.max_seq_len, config.quant)
    kv_dtype = kv_cache_dtype(config, dtype)
    lora = _lora_config(config, model, decoder)
    pages_dtype = adapter_dtype(config, model, dtype, device)
    free_bytes = usable_bytes(config, device, before)
    if isinstance(decoder, Decoder):
        limits = batch_limits(config, model, dtype, config.max_seq_len or model.max_seq_len)
        free_bytes = max(0, free_bytes - peak_bytes(decoder, device, limits, config))
    on_gpu = device.torch.type == "cuda"
    room = adapter_room(config, lora, model, pages_dtype, free_bytes) if on_gpu else 0
    plan = plan_kv(config, model, kv_dtype, device.torch, free_bytes - room)
    kv_tensor = allocate_kv(plan, config, model, kv_dtype, device.torch)
    # On a CPU the cache's pages are not touched yet, so the system still counts them as free.
    untouched = plan.num_bytes if device.torch.type == "cpu" else 0
    free_bytes = max(0, usable_bytes(config, device, before) - untouched)
    base = BaseWeights(config.model_dir, EffectiveWeights(model, config.quant, dtype))
    lora = with_room(lora, room, free_bytes)
    adapters = AdapterStore.open(model, lora, device.torch, pages_dtype, free_bytes, base)
    limits = batch_limits(config, model, dtype, plan.max_seq_len)
    runner = Runner(decoder, kv_tensor, device, adapters, limits)
    runner.try_variants()
    _record_decoding(runner, config, model, device)
    guides = None
    if config.tokenizer_dir is not None:
        guides = Guides(config.tokenizer_dir, model.vocab_size, model.eos_token_ids)
    overlap = device.overlaps if config.enable_overlap is None else config.enable_overlap
    overlap = overlap and model.encoder is None  # an encoder runs between the steps
    logger.info(
        "engine ready in %.1f s: %s on %s, %s%s, %d KV blocks of %d tokens",
        time.perf_counter() - started,
        model.architecture,
        device.name,
        str(dtype).removeprefix("torch."),
        " with products of bfloat16" if device.ops.rounds_inputs else "",
        plan.num_blocks,
        config.tokens_per_block,
    )
    return EngineParts(model, device, decoder, plan, base, adapters, runner, guides, overlap)


def _lora_config(
    config: EngineConfig, model: ModelConfig, decoder: Decoder | EncoderDecoder
) -> LoraCacheConfig:
    """The adapter settings, with the target modules that can be served beside quantised experts."""
    if not decoder.has_quantised_experts:
        return config.lora
    algo = weights_algo(config.model_dir, config.quant) if model.quant is None else model.quant.algo
    targets = targets_beside_quantised_experts(config.lora.target_modules, model, algo)
    return replace(config.lora, target_modules=targets)


def _record_decoding(runner: Runner, config: EngineConfig, model: ModelConfig, device: Device) -> None:
    """Record decode steps as CUDA graphs, where the device, the model and the settings allow it."""
    wanted = config.enable_cuda_graph
    if device.capture is None:
        if wanted:
            logger.warning("cuda_graph_mode has no effect on %s: steps are not recorded", device.name)
    elif model.encoder is not None:
        logger.info("steps are not recorded: encoder-decoder models are not")
    elif wanted is None or wanted:
        runner.record_decoding(config.cuda_graph_cache_size or DEFAULT_NUM_GRAPHS)
