"""Sizes the KV cache, and the memory it leaves to adapters."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.kernels.device import Device, host_tensor
from manylora.kernels.recurrent import RecurrentState
from manylora.kernels.spec import BatchLimits
from manylora.lora.geometry import usual_bytes
from manylora.lora.modules import lora_modules
from manylora.model.delta_rule import make_states
from manylora.model.kv_tensors import KvTensors, make_kv, token_numbers

logger = logging.getLogger("manylora")

USUAL_ADAPTERS = 32
MOST_ROOM = 0.3
MOST_STATES = 0.5  # share of recurrent states in the memory for states and KV cache


@dataclass(frozen=True)
class KvPlan:
    """Measured sizes of one engine's KV cache."""

    num_blocks: int
    max_seq_len: int  # tokens, prompt + output
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def kv_cache_dtype(config: EngineConfig, dtype: torch.dtype, device: Device) -> torch.dtype:
    """The dtype of keys and values. dtype: that of the computation."""
    if config.quant is not None and config.quant.fp8_kv_cache:
        return torch.float8_e4m3fn
    return torch.bfloat16 if device.ops.rounds_inputs else dtype


def check_model(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError for drafts that could not be undone, and for sequences longer than the model's
    positions, which it was not trained on or does not have.
    """
    if config.max_draft_len and (model.recurrent is not None or model.encoder is not None):
        kind = "models with recurrent layers" if model.recurrent is not None else "encoder-decoder models"
        raise ConfigError(
            f"max_draft_len {config.max_draft_len}: drafts (speculative_config) are not supported on {kind}: "
            "leave it out"
        )
    if model.encoder is not None and model.encoder.relative_buckets:  # relative positions have no limit
        return
    most = model.max_seq_len
    if config.max_seq_len is not None and config.max_seq_len > most:
        raise ConfigError(
            f"max_seq_len {config.max_seq_len} is more than the model's {most} positions: use {most} or less "
            "(a longer context needs rope scaling and max_position_embeddings in its config.json)"
        )


def usable_bytes(config: EngineConfig, device: Device, before: int) -> int:
    """Free bytes that may be used within gpu_memory_utilization. before: bytes that were free at the
    start.
    """
    free = device.free_bytes()
    if config.gpu_memory_utilization is None:
        return free
    own = max(0, before - free)  # other processes may have freed more than this one took
    return max(0, min(free, int(config.gpu_memory_utilization * device.total_bytes()) - own))


def plan_states(config: EngineConfig, model: ModelConfig, free_bytes: int) -> int:
    """Slots of recurrent state: one per sequence of a full batch, and as many for prefix reuse if they fit.

    0: the model has no recurrent layers. Raises ConfigError.
    """
    own = model.recurrent
    if own is None:
        return 0
    snapshots = config.max_batch_size if config.enable_kv_cache_reuse else 0
    room = int(MOST_STATES * config.kv_cache_free_gpu_mem_fraction * free_bytes) // own.state_bytes
    slots = min(config.max_batch_size + snapshots, room)
    if slots < config.max_beam_width:
        raise ConfigError(
            f"no room for recurrent states: one sequence takes {own.state_bytes} bytes, at least "
            f"{config.max_beam_width} run together, {free_bytes} bytes are free; lower max_beam_width or use "
            "a larger device"
        )
    if slots < config.max_batch_size:
        logger.warning(
            "recurrent states of %d sequences fit: more do not run together, though max_batch_size is %d",
            slots,
            config.max_batch_size,
        )
    logger.info("recurrent states: %d slots of %.1f MiB", slots, own.state_bytes / 2**20)
    return slots


def allocate_states(slots: int, model: ModelConfig, device: torch.device) -> RecurrentState | None:
    """None without recurrent layers."""
    if model.recurrent is None:
        return None
    try:
        return make_states(model.recurrent, slots, device)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"recurrent states of {slots * model.recurrent.state_bytes} bytes cannot be allocated; "
            "lower max_batch_size"
        ) from error


def plan_kv(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, free_bytes: int
) -> KvPlan:
    """Size the cache: a fraction of the free bytes, but no more than the user allows or a full batch can use.

    Bytes of a block = tokens_per_block * bytes of dtype * the sum over layers of planes (2: keys, values) *
    kv_heads * head_dim. Encoder layers do not count. On a CPU the cache is never larger than max_batch_size
    sequences of max_seq_len need, because host memory is shared with everything else on the machine.
    """
    size = config.tokens_per_block
    block_bytes = size * token_numbers(model) * dtype.itemsize
    max_seq_len = config.max_seq_len or model.max_seq_len
    prompts = 2 if model.encoder else 1  # the encoder's prompt takes blocks, too
    num_blocks = int(config.kv_cache_free_gpu_mem_fraction * free_bytes) // block_bytes
    if config.max_tokens_in_paged_kv_cache is not None:
        num_blocks = min(num_blocks, -(-config.max_tokens_in_paged_kv_cache // size))
    if device.type == "cpu":
        num_blocks = min(num_blocks, config.max_batch_size * prompts * -(-max_seq_len // size))
    if num_blocks < 1:
        raise ConfigError(
            f"no room for a KV cache: one block of {size} tokens takes {block_bytes} bytes, "
            f"{free_bytes} bytes are free; lower tokens_per_block or use a larger device"
        )
    capacity = num_blocks // prompts * size
    if capacity < max_seq_len:
        logger.warning("the KV cache holds %d tokens: max_seq_len is lowered from %d", capacity, max_seq_len)
        max_seq_len = capacity
    if max_seq_len < 2:
        raise ConfigError("max_seq_len must be at least 2: one prompt token and one output token")
    return KvPlan(num_blocks, max_seq_len, block_bytes)


def adapter_room(
    config: EngineConfig, lora: LoraCacheConfig, model: ModelConfig, dtype: torch.dtype, free_bytes: int
) -> int:
    """Bytes that the KV cache leaves to adapters on a GPU. 0 if the user has sized the device level.

    They hold as many adapters of the optimal rank as run in a batch, up to USUAL_ADAPTERS, and one of the
    largest rank, but at most MOST_ROOM of the free memory. dtype: of the adapters' pages.
    """
    if lora.sizes_device:
        return 0
    modules = lora_modules(model, lora.target_modules).values()
    count = min(config.max_batch_size, USUAL_ADAPTERS)
    wanted = usual_bytes(modules, model.num_layers, lora, dtype.itemsize, count)
    room = min(wanted, int(MOST_ROOM * free_bytes))
    if room > lora.gpu_memory_fraction * (1 - config.kv_cache_free_gpu_mem_fraction) * free_bytes:
        logger.info(
            "the KV cache leaves %d MiB to adapters, %d of rank %d and one of rank %d where they fit: "
            "lora_cache_gpu_memory_fraction chooses another size",
            room // 2**20,
            count,
            min(lora.optimal_adapter_size, lora.rank_limit),
            lora.rank_limit,
        )
    return room


def with_room(lora: LoraCacheConfig, room: int, free_bytes: int) -> LoraCacheConfig:
    """The settings with both levels enlarged to at least the result of `adapter_room`. free_bytes: after the
    KV cache.
    """
    if not room:
        return lora
    device = max(room, int(lora.gpu_memory_fraction * free_bytes))
    host = lora.host_memory_bytes if lora.sizes_host else max(lora.host_memory_bytes, device)
    return replace(lora, gpu_memory_bytes=device, host_memory_bytes=host)


def batch_limits(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, max_seq_len: int
) -> BatchLimits:
    """The largest shapes that the device's kernels must support."""
    return BatchLimits(
        num_layers=model.num_layers,
        max_sequences=config.max_decode_rows,
        max_seq_len=max_seq_len,
        tokens_per_block=config.tokens_per_block,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        softcap=model.attention_softcap,
        sinks=model.attention_sinks,
        windows=frozenset(model.sliding_windows or (None,)),
        num_experts=model.moe.num_experts if model.moe is not None else 0,
        chunk_tokens=config.chunk_tokens,
        other_heads=frozenset((heads, dim) for _, heads, dim in model.kv_shapes),
    )


def allocate_kv(
    plan: KvPlan, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> KvTensors:
    """The cache itself, filled with zeros.

    Zeros matter: masked positions are multiplied by a probability of 0, and 0 * NaN is NaN.
    """

    def make(shape: tuple[int, ...]) -> Tensor:
        if device.type == "cpu":
            return host_tensor(shape, dtype, device)
        return torch.zeros(shape, dtype=dtype, device=device)

    try:
        return make_kv(model, plan.num_blocks, config.tokens_per_block, make)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"the KV cache of {plan.num_bytes} bytes cannot be allocated; "
            "lower kv_cache_free_gpu_mem_fraction"
        ) from error
