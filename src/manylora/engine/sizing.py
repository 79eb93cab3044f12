"""Divides the memory that weights and the largest step leave: adapters, recurrent states, KV cache.

What the user sized is taken as it is. The rest gives way in this order: the batch (on a CPU), adapters beyond
one of the largest rank, adapters on routed experts, the largest rank, the tokens of the KV cache, and with
them the longest sequence. On a GPU all is allocated at the start. On a CPU sizes are limits: memory that was
never used is not resident.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from manylora.adapters.geometry import usual_bytes
from manylora.adapters.modules import LoraModule, beside_experts, lora_modules
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.kernels.device import Device, host_tensor
from manylora.kernels.recurrent import RecurrentState
from manylora.kernels.spec import BatchLimits
from manylora.model.batch import KvTensors, make_kv, make_states, token_numbers
from manylora.system.resources import UNLIMITED

logger = logging.getLogger("manylora")

USUAL_ADAPTERS = 32
SMALLEST_LIMIT = 8  # the rank limit is not lowered further than this
CPU_SHARE = 0.5  # of the free memory of a machine, which others use, too, if the user asked for nothing else
MOST_ROOM = 0.3  # share of adapters in the memory for all caches
MOST_STATES = 0.5  # share of recurrent states in the memory for states and KV cache
SMALLEST_BATCH = 8  # sequences; with 256 tokens in a step
STEP_SHARE = 0.2  # of the free memory of a machine, for the largest step
USUAL_TOKENS = 4096  # of KV cache: for these a machine gives more than CPU_SHARE of its free memory,
MOST_SHARE = 0.9  # up to this
LEAST_TOKENS = 512  # of KV cache, where the least that works is taken


@dataclass(frozen=True)
class KvPlan:
    """Measured sizes of one engine's KV cache."""

    num_blocks: int
    max_seq_len: int  # tokens, prompt + output
    block_bytes: int

    @cached_property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """How one rank divides its memory."""

    config: EngineConfig  # with a batch, a rank limit and bytes of the adapter cache's levels that fit
    kv: KvPlan
    state_slots: int  # of recurrent state; 0: the model has none
    state_bytes: int


def kv_cache_dtype(config: EngineConfig, dtype: torch.dtype, device: Device) -> torch.dtype:
    """The dtype of keys and values. dtype: that of the computation."""
    if config.quant is not None and config.quant.fp8_kv_cache:
        return torch.float8_e4m3fn
    return torch.bfloat16 if device.ops.rounds_inputs else dtype


def check_model(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError for drafts that could not be undone, and for too long sequences."""
    kind = "models with recurrent layers" if model.recurrent is not None else "encoder-decoder models"
    if config.max_draft_len and (model.recurrent is not None or model.encoder is not None):
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
    """Free bytes within gpu_memory_utilization. before: those that were free at the start."""
    free = device.free_bytes()
    if config.gpu_memory_utilization is None:
        return free
    own = max(0, before - free)  # other processes may have freed more than this one took
    return max(0, min(free, int(config.gpu_memory_utilization * device.total_bytes()) - own))


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    free_bytes: int,
    agree: Callable[[int], int] = int,
) -> MemoryPlan:
    """Divide `free_bytes`, which weights and, on a GPU, the largest step have left.

    model: as this rank has it. dtypes: of keys and values, and of adapters. agree: the least of a number over
    all ranks. Raises ConfigError that names what does not fit.
    """
    kv_dtype, pages_dtype = dtypes
    on_cpu, fraction = device.type == "cpu", config.kv_cache_free_gpu_mem_fraction
    if on_cpu:
        config = _fit_batch(config, model, agree(free_bytes))
        free_bytes = max(0, free_bytes - step_bytes(config, model))
    whole = free_bytes
    if on_cpu and not config.sizes_kv:
        free_bytes, fraction = int(CPU_SHARE * free_bytes), 1.0
    lora = config.lora
    adapters = _Adapters(lora, model, pages_dtype, min(config.max_batch_size, USUAL_ADAPTERS), agree)
    chosen, room = lora.sizes_device, lora.gpu_memory_bytes or 0
    if not chosen:
        lora, room = adapters.on_cpu(free_bytes) if on_cpu else adapters.on_gpu(free_bytes)
    left = max(0, free_bytes - room)
    floor = on_cpu and not config.sizes_kv  # its memory is taken when it is used
    slots = agree(plan_states(config, model, int(fraction * left), floor))
    state_bytes = slots * model.recurrent.state_bytes if model.recurrent else 0
    kv_bytes = int(fraction * (left - state_bytes))
    if on_cpu and not config.sizes_kv:
        one = USUAL_TOKENS * token_numbers(model) * kv_dtype.itemsize
        kv_bytes = max(kv_bytes, min(one, int(MOST_SHARE * whole) - room - state_bytes))
    kv = plan_kv(config, model, kv_dtype, device, kv_bytes, floor)
    kv = replace(kv, num_blocks=agree(kv.num_blocks), max_seq_len=agree(kv.max_seq_len))
    on_device = int(lora.gpu_memory_fraction * max(0, whole - room - state_bytes - kv.num_bytes))
    if chosen:
        lora = adapters.within(room or on_device)
        if on_cpu and not (lora.sizes_host or lora.sizes_rows):
            on_host = max(room or on_device, min(lora.host_memory_bytes, adapters.most(free_bytes)))
            lora = replace(lora, host_memory_bytes=on_host)
    elif not on_cpu:
        lora = replace(lora, gpu_memory_bytes=max(room, on_device))
    if lora.rank_limit < config.lora.rank_limit:
        logger.warning(
            "adapters may have rank %d at most, not %d: one of rank %d with every module does not fit",
            lora.rank_limit,
            *[config.lora.rank_limit] * 2,
        )
    return MemoryPlan(replace(config, lora=lora), kv, slots, state_bytes)


def step_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """About what the largest step takes on a CPU: hidden states, MLP inputs and logits, in float32."""
    rows = config.max_num_tokens * (8 * model.hidden_size + 3 * model.intermediate_size)
    return 4 * (rows + 3 * config.max_decode_rows * model.vocab_size)


def _fit_batch(config: EngineConfig, model: ModelConfig, free_bytes: int) -> EngineConfig:
    """The settings with a batch that leaves room, unless the user chose it, equal on all ranks."""
    batch, tokens = config.max_batch_size, config.max_num_tokens
    if (batch, tokens) != (EngineConfig.max_batch_size, EngineConfig.max_num_tokens):
        return config
    while step_bytes(config, model) > STEP_SHARE * free_bytes and config.max_batch_size > SMALLEST_BATCH:
        half = config.max_batch_size // 2
        beams = min(config.max_beam_width, half)
        shorter = config.max_num_tokens // 2
        config = replace(config, max_batch_size=half, max_beam_width=beams, max_num_tokens=shorter)
    if config.max_batch_size < batch:
        logger.warning(
            "a step has %d sequences and %d tokens at most, not %d and %d, which would take too much of the "
            "free memory",
            *(config.max_batch_size, config.max_num_tokens, batch, tokens),
        )
    return config


@dataclass(frozen=True)
class _Adapters:
    """Sizes the adapter cache. dtype: of its pages. count: adapters of the optimal rank to make room for."""

    lora: LoraCacheConfig
    model: ModelConfig
    dtype: torch.dtype
    count: int
    agree: Callable[[int], int]  # as in `plan_memory`

    def on_gpu(self, free_bytes: int) -> tuple[LoraCacheConfig, int]:
        """The settings with a rank limit that fits, and the bytes for adapters: MOST_ROOM at most."""
        most = self.most(free_bytes)
        if self.lora.sizes_host and not self.lora.sizes_rows:
            most = min(most, self.lora.host_memory_bytes)
        lora, largest, usual = self._fit(most)
        return lora, max(largest, min(usual, most))

    def on_cpu(self, free_bytes: int) -> tuple[LoraCacheConfig, int]:
        """The same for the host level, from which a CPU computes. The device level may use all of it."""
        if self.lora.sizes_host:
            lora = self.within(self.lora.host_memory_bytes)
            return replace(lora, gpu_memory_bytes=UNLIMITED), lora.host_memory_bytes
        most = self.most(free_bytes)
        lora, largest, usual = self._fit(most)
        room = max(largest, min(most, max(usual, self.lora.host_memory_bytes)))
        return replace(lora, gpu_memory_bytes=room, host_memory_bytes=room), room

    def within(self, most: int) -> LoraCacheConfig:
        """The settings with a rank limit that fits the user's size. Unchanged if none does."""
        if self.lora.sizes_rows:
            return self.lora
        if self.lora.sizes_host:
            most = min(most, self.lora.host_memory_bytes)
        lora, largest, _ = self._fit(most)
        return lora if self.agree(largest <= most) else self.lora

    def _fit(self, most: int) -> tuple[LoraCacheConfig, int, int]:
        """The first settings that fit `most` bytes on every rank, or the last. Also the bytes of one adapter
        of the largest rank, and with `count` usual ones.
        """
        for lora, modules in self._narrower():
            largest, usual = (
                usual_bytes(modules, self.model.num_layers, lora, self.dtype.itemsize, count)
                for count in (0, self.count)
            )
            if self.agree(largest <= most):
                break
        return lora, largest, usual

    def _narrower(self) -> Iterator[tuple[LoraCacheConfig, tuple[LoraModule, ...]]]:
        """The settings, then without what takes most, unless asked for: routed experts, large ranks."""
        lora, modules = self.lora, lora_modules(self.model, self.lora.target_modules)
        yield lora, tuple(modules.values())
        if self.model.moe is not None and not lora.target_modules:
            modules = beside_experts(modules)
            yield lora, tuple(modules.values())
        rank = lora.rank_limit
        while rank > SMALLEST_LIMIT and lora.rank_limit == LoraCacheConfig.max_adapter_size:
            rank = max(SMALLEST_LIMIT, rank // 2)
            yield replace(lora, max_lora_rank=rank), tuple(modules.values())

    def most(self, free_bytes: int) -> int:
        """Bytes that adapters may take if nobody chose a size, the same on every rank."""
        return int(MOST_ROOM * max(0, self.agree(free_bytes)))


def plan_states(config: EngineConfig, model: ModelConfig, free_bytes: int, floor: bool = False) -> int:
    """Slots of recurrent state: one per sequence of a full batch, and as many for prefix reuse if they fit.
    floor: at least those that are needed, even if they do not fit. Raises ConfigError.
    """
    own = model.recurrent
    if own is None:
        return 0
    snapshots = config.max_batch_size if config.enable_kv_cache_reuse else 0
    room = int(MOST_STATES * free_bytes) // own.state_bytes
    slots = min(config.max_batch_size + snapshots, max(room, config.max_beam_width if floor else 0))
    if slots < config.max_beam_width:
        raise ConfigError(
            f"no room for recurrent states: one sequence takes {own.state_bytes} bytes, at least "
            f"{config.max_beam_width} run together, {free_bytes} bytes are free; lower max_beam_width or use "
            "a larger device"
        )
    if slots < config.max_batch_size:
        text = "recurrent states of %d sequences fit: more do not run together, though max_batch_size is %d"
        logger.warning(text, slots, config.max_batch_size)
    logger.info("recurrent states: %d slots of %.1f MiB", slots, own.state_bytes / 2**20)
    return slots


def plan_kv(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    free_bytes: int,
    floor: bool = False,
) -> KvPlan:
    """Size the cache: the free bytes, but no more than the user allows or a full batch can use.

    Bytes of a block = tokens_per_block * bytes of dtype * the sum over layers of planes (2: keys, values) *
    kv_heads * head_dim. Encoder layers do not count. On a CPU the cache is never larger than max_batch_size
    sequences of max_seq_len need, because host memory is shared with everything else on the machine.
    floor: take the least that works even if it does not fit. Raises ConfigError.
    """
    size = config.tokens_per_block
    block_bytes = size * token_numbers(model) * dtype.itemsize
    max_seq_len = config.max_seq_len or model.max_seq_len
    prompts = 2 if model.encoder else 1  # the encoder's prompt takes blocks, too
    num_blocks = max(0, free_bytes) // block_bytes
    if floor:
        num_blocks = max(num_blocks, prompts * -(-min(max_seq_len, LEAST_TOKENS) // size))
    if config.max_tokens_in_paged_kv_cache is not None:
        num_blocks = min(num_blocks, -(-config.max_tokens_in_paged_kv_cache // size))
    if device.type == "cpu":
        num_blocks = min(num_blocks, config.max_batch_size * prompts * -(-max_seq_len // size))
    if num_blocks < 1:
        remedy = "lower tokens_per_block or use a larger device"
        if config.gpu_memory_utilization is not None:
            remedy = "raise gpu_memory_utilization"
        raise ConfigError(
            f"no room for a KV cache: one block of {size} tokens takes {block_bytes} bytes, "
            f"{free_bytes} bytes are free; {remedy}"
        )
    capacity = num_blocks // prompts * size
    if capacity < max_seq_len:
        logger.warning("the KV cache holds %d tokens: max_seq_len is lowered from %d", capacity, max_seq_len)
        max_seq_len = capacity
    if max_seq_len < 2:
        raise ConfigError("max_seq_len must be at least 2: one prompt token and one output token")
    text = "KV cache: up to %.1f GiB, %d tokens" if device.type == "cpu" else "KV cache: %.1f GiB, %d tokens"
    if not model.bidirectional:  # encoders write nothing to it
        logger.info(text, num_blocks * block_bytes / 2**30, num_blocks * size)
    return KvPlan(num_blocks, max_seq_len, block_bytes)


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


def allocate(
    plan: MemoryPlan, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[KvTensors, RecurrentState | None]:
    """The KV cache, of zeros (for masked positions: 0 * NaN is NaN), and states of recurrent layers."""

    def make(shape: tuple[int, ...]) -> Tensor:
        if device.type == "cpu":
            return host_tensor(shape, dtype, device)
        return torch.zeros(shape, dtype=dtype, device=device)

    what, remedy = f"the KV cache of {plan.kv.num_bytes}", "kv_cache_free_gpu_mem_fraction"
    try:
        kv = make_kv(model, plan.kv.num_blocks, plan.config.tokens_per_block, make)
        what, remedy = f"recurrent states of {plan.state_bytes}", "max_batch_size"
        return kv, make_states(model.recurrent, plan.state_slots, device) if model.recurrent else None
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"{what} bytes cannot be allocated; lower {remedy}") from error
