"""build_parts: reads the model, opens the device, loads weights, and divides memory between the caches.
Sleep: an idle engine without some of these parts.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from manylora.adapters.cache.store import AdapterStore
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.modules import lora_modules, targets_beside_quantised_experts
from manylora.config.engine import EngineConfig, weights_algo
from manylora.config.model import ModelConfig
from manylora.config.model_folder import weight_files
from manylora.config.pooling import longest_text
from manylora.engine.guide import Guides
from manylora.engine.kv_store import KvStore
from manylora.engine.runner import Runner
from manylora.engine.sizing import (
    MemoryPlan,
    allocate,
    batch_limits,
    check_model,
    kv_cache_dtype,
    plan_memory,
    usable_bytes,
)
from manylora.engine.step_messages import END, Others
from manylora.engine.warmup import peak_bytes
from manylora.kernels import native
from manylora.kernels.device import Device, device_of_rank, open_device
from manylora.kernels.recurrent import RecurrentState
from manylora.kernels.spec import BatchLimits
from manylora.model.batch import KvTensors
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.model.heads import load_dense
from manylora.model.quant import EffectiveWeights
from manylora.model.weights import adapter_dtype, compute_dtype, load_decoder, weight_bytes
from manylora.ranks.adapters import AdapterSlicer
from manylora.ranks.channel import Collectives, Message
from manylora.ranks.leader import Leader
from manylora.ranks.mapping import Mapping
from manylora.ranks.model import load_rank
from manylora.ranks.rank_info import RankInfo
from manylora.ranks.rendezvous import interface_of, join_collectives, leave_group
from manylora.system.lifeline import is_draining, is_launched
from manylora.system.resources import keep_memory
from manylora.version import __version__

logger = logging.getLogger("manylora")

DEFAULT_NUM_GRAPHS = 128
MOST_WIDENED = 20  # times its bytes in the file that a weight takes in memory: IQ1 in float32


@dataclass(frozen=True)
class RankParts:
    """The parts that every rank of an engine has."""

    config: EngineConfig  # with a batch and an adapter cache that fit
    model: ModelConfig
    device: Device
    decoder: Decoder | EncoderDecoder
    memory: MemoryPlan
    kv: KvTensors
    states: RecurrentState | None
    limits: BatchLimits
    dtype: torch.dtype
    pages_dtype: torch.dtype
    free_bytes: int  # device memory for adapters
    slicer: AdapterSlicer | None  # None: there is only one rank


@dataclass(frozen=True)
class EngineParts(RankParts):
    """The parts of an engine, on rank 0."""

    base: BaseWeights  # the checkpoint's, needed to read adapters from disk (DoRA, trained biases)
    adapters: AdapterStore
    runner: Runner
    guides: Guides | None  # None: guided decoding is not enabled
    overlap: bool  # whether a step is launched before the tokens of the previous one are known
    leader: Leader | None  # tells the other ranks what to do
    store: KvStore | None  # of KV blocks beside the device's


def meet_group(config: EngineConfig, info: RankInfo, store: Store) -> Collectives:
    """Join the group of ranks. Raises ConfigError."""
    device = torch.device(device_of_rank(config.device, info.local_rank, info.local_size))
    tp, pp, ep = config.tensor_parallel_size, config.pipeline_parallel_size, config.moe_expert_parallel_size
    with interface_of(info):
        join_collectives(info, store, "nccl" if device.type == "cuda" else "gloo")
        return Collectives(Mapping(tp * pp, info.rank, tp, pp, ep), device)


def build_rank(config: EngineConfig, info: RankInfo, comm: Collectives | None) -> RankParts:
    """Load this rank's weights and allocate its KV cache, as all ranks do now. Raises ConfigError."""
    name = config.device
    if comm is not None:
        name = device_of_rank(name, info.local_rank, info.local_size)
    device = open_device(name)
    on_cpu = device.torch.type == "cpu"
    if on_cpu:
        keep_memory()
        if info.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:  # or threads of ranks share cores
            torch.set_num_threads(max(1, torch.get_num_threads() // info.local_size))
    before = device.free_bytes()
    model = read_model_config(config.model_dir)
    check_model(config, model)
    dtype = compute_dtype(config.dtype, model, device)
    decoder = _load(config, model, dtype, device, comm)
    local, targets = model if comm is None else decoder.config, config.lora.target_modules
    slicer = None if comm is None else AdapterSlicer(model, comm.mapping, targets, comm.least)
    kv_dtype = kv_cache_dtype(config, dtype, device)
    if decoder.has_quantised_experts:
        algo = weights_algo(config.model_dir, config.quant) if model.quant is None else model.quant.algo
        targets = targets_beside_quantised_experts(targets, model, algo)
        config = replace(config, lora=replace(config.lora, target_modules=targets))
    if config.max_seq_len is None and (longest := longest_text(config.model_dir)) is not None:
        config = replace(config, max_seq_len=min(longest, model.max_seq_len))
    pages_dtype = adapter_dtype(config, model, dtype, device)
    share = info.local_size if on_cpu else 1  # ranks that share the same memory
    free_bytes = usable_bytes(config, device, before) // share
    if isinstance(decoder, Decoder):
        limits = batch_limits(config, local, dtype, kv_dtype, config.max_seq_len or local.max_seq_len)
        modules = lora_modules(local, config.lora.target_modules).values()
        free_bytes = max(0, free_bytes - peak_bytes(decoder, device, limits, config, modules))
    if on_cpu:
        free_bytes = max(0, free_bytes - config.kv_cache_host_memory_bytes)
    dtypes, agree = (kv_dtype, pages_dtype), int if comm is None else comm.least
    memory = plan_memory(config, local, dtypes, device.torch, free_bytes, agree)
    config, plan = memory.config, memory.kv
    kv, states = allocate(memory, local, kv_dtype, device.torch)
    # On a CPU the cache's pages have not been touched yet, so the system still counts them as free.
    untouched = plan.num_bytes + memory.state_bytes if on_cpu else 0
    return RankParts(
        config=config,
        model=model,
        device=device,
        decoder=decoder,
        memory=memory,
        kv=kv,
        states=states,
        limits=batch_limits(config, local, dtype, kv_dtype, plan.max_seq_len),
        dtype=dtype,
        pages_dtype=pages_dtype,
        free_bytes=max(0, usable_bytes(config, device, before) // share - untouched),
        slicer=slicer,
    )


def _load(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    comm: Collectives | None = None,
) -> Decoder | EncoderDecoder:
    common, limit = (config.model_dir, model, dtype, device), config.max_seq_len
    decoder: Decoder | EncoderDecoder
    if comm is not None:
        decoder = load_rank(*common, comm, config.quant, limit)
    else:
        # Say that the weights may not fit, before the system ends the process without a word.
        free, stored = device.free_bytes(), sum(one.stat().st_size for one in weight_files(config.model_dir))
        if MOST_WIDENED * stored >= free:  # otherwise headers are not read, which takes a tenth of a start
            needed = weight_bytes(*common)
            if needed > free:
                text = "the weights take about %d MiB, and %d MiB are free on %s: loading them may fail"
                logger.warning(text, needed // 2**20, free // 2**20, device.name)
        decoder = load_decoder(*common, limit, config.quant)
    decoder.dense = load_dense(config.model_dir, model.hidden_size, device.torch)
    return decoder


def load_weights(parts: RankParts) -> Decoder | EncoderDecoder:
    """Of an engine with one rank, again. Raises ConfigError."""
    return _load(parts.config, parts.model, parts.dtype, parts.device)


def build_parts(config: EngineConfig, info: RankInfo) -> EngineParts:
    """info: of rank 0. Raises ConfigError, as `build_rank`."""
    started = time.perf_counter()
    leader = Leader(config, info) if info.size > 1 else None
    try:
        comm = meet_group(config, info, leader.store) if leader is not None else None
        parts = _rank_0(build_rank(config, info, comm), leader)
    except Exception as error:
        if leader is None:
            raise
        reason = leader.start_error(error)
        leader.close()
        leave_group()
        raise reason from error
    logger.info(
        "engine ready in %.1f s: %s on %s, %s%s, %d KV blocks of %d tokens%s",
        time.perf_counter() - started,
        parts.model.architecture,
        parts.device.name,
        str(parts.decoder.dtype).removeprefix("torch."),
        " with products of bfloat16" if parts.device.ops.rounds_inputs else "",
        parts.memory.kv.num_blocks,
        config.tokens_per_block,
        f", {info.size} ranks" if leader is not None else "",
    )
    return parts


def _rank_0(rank: RankParts, leader: Leader | None) -> EngineParts:
    config, model, device = rank.config, rank.model, rank.device
    base = BaseWeights(config.model_dir, EffectiveWeights(model, config.quant, rank.dtype))
    adapters = AdapterStore(
        model,
        config.lora,
        device.torch,
        rank.pages_dtype,
        rank.free_bytes,
        base=base,
        slicer=rank.slicer,
        others=None if leader is None else Others(leader),
    )
    runner = open_runner(rank, adapters, leader)
    guides = None
    if config.tokenizer_dir is not None and model.makes_text:
        guides = Guides(config.tokenizer_dir, model.vocab_size, model.eos_token_ids)
    overlaps = device.overlaps and leader is None
    overlap = overlaps if config.enable_overlap is None else config.enable_overlap
    overlap = overlap and model.encoder is None  # an encoder runs between the steps
    return EngineParts(
        **vars(rank),
        base=base,
        adapters=adapters,
        runner=runner,
        guides=guides,
        overlap=overlap,
        leader=leader,
        store=open_store(rank, leader),
    )


def open_runner(rank: RankParts, adapters: AdapterStore, leader: Leader | None = None) -> Runner:
    runner = Runner(
        rank.decoder, rank.kv, rank.device, adapters, rank.limits, leader=leader, states=rank.states
    )
    if leader is None:
        runner.compile_kernels()
        _record_decoding(runner, rank)
    elif rank.device.torch.type != "cpu":
        logger.info("with several ranks steps are neither recorded nor overlapped")
    return runner


def open_store(rank: RankParts, leader: Leader | None) -> KvStore | None:
    """None: no store was asked for, or it would not work. Raises ConfigError."""
    config, model, device = rank.config, rank.model, rank.device
    if not config.kv_cache_host_memory_bytes and config.kv_disk_cache_dir is None:
        return None
    reasons = {
        "enable_kv_cache_reuse is false": not config.enable_kv_cache_reuse,
        "encoders keep no KV blocks": model.bidirectional,
        "models with recurrent layers also need their states": model.recurrent is not None,
        "each of several ranks has only a part of a block": leader is not None,
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    if reason is not None:
        logger.warning("kv_cache_host_memory_bytes and kv_disk_cache_dir have no effect: %s", reason)
        return None
    library = native.loaded()
    kernels = type(device.ops).__name__, device.ops.rounds_inputs, library and Path(library._name).name
    types = rank.dtype, rank.pages_dtype, config.quant, config.chunk_tokens
    gpu = device.name if device.torch.type == "cuda" else ""
    return KvStore(rank.kv, device.torch, config, (__version__, torch.__version__, kernels, gpu, types))


def _record_decoding(runner: Runner, rank: RankParts) -> None:
    """Capture decode steps as CUDA graphs if device, model and settings allow it."""
    config, model, device = rank.config, rank.model, rank.device
    reasons = {
        "encoder-decoder models are not": model.encoder is not None,
        "encoders generate no tokens": model.bidirectional,
        "models with latent attention are not": model.latent is not None,
        "models whose layers attend in chunks are not": model.attention_chunk is not None,
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    if device.capture is None:
        if config.enable_cuda_graph:
            logger.warning("cuda_graph_mode has no effect on %s: steps are not recorded", device.name)
    elif reason is not None:
        logger.info("steps are not recorded: %s", reason)
    elif config.enable_cuda_graph is not False:
        runner.record_decoding(config.cuda_graph_cache_size or DEFAULT_NUM_GRAPHS)


def end_ranks(parts: EngineParts) -> None:
    """End the other ranks, for good unless a launcher restarts the server. Idempotent."""
    for_good = not is_launched() or is_draining()
    if parts.leader is not None and parts.leader.end(Message(END, {"for_good": for_good})):
        leave_group()


GONE: Any = None  # instead of a part while its memory is freed
LEVELS = (1, 2)
TAGS = ("weights", "kv_cache")


class Sleep:
    """parts: of an engine without open requests, whose caller drops its own. level 1: the KV cache and
    recurrent states are freed, and on a GPU the weights move to the host. 2: the weights are freed, and
    `wake` reads their files again.

    asleep: the parts that are left. missing: TAGS that have not woken up.
    """

    def __init__(self, parts: EngineParts, level: int) -> None:
        self.level, self.missing = level, set(TAGS)
        gone = ("kv", "states", "runner", "decoder")[: 2 + level]
        self.asleep = replace(parts, **dict.fromkeys(gone, GONE))
        if isinstance(parts.decoder, Decoder):
            parts.decoder.forget()
        moves = level == 1 and parts.device.torch.type != "cpu"
        self._moved = Moved(tensors_in(parts.decoder)) if moves else None

    def wake(self, tags: set[str]) -> EngineParts | None:
        """The parts of an engine that is awake, once all TAGS have been woken. Raises ConfigError."""
        parts = self.asleep
        if "weights" in tags & self.missing:
            if self._moved is not None:
                self._moved.back()
            if self.level == 2:
                self.asleep = parts = replace(parts, decoder=load_weights(parts))
            self.missing.discard("weights")
        if "kv_cache" in tags & self.missing:
            dtype = kv_cache_dtype(parts.config, parts.dtype, parts.device)
            kv, states = allocate(parts.memory, parts.model, dtype, parts.device.torch)
            self.asleep = parts = replace(parts, kv=kv, states=states)
            self.missing.discard("kv_cache")
        return None if self.missing else replace(parts, runner=open_runner(parts, parts.adapters))


class Moved:
    """Tensors whose memory is on the host. Those that share memory share it again after `back`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: dict[int, tuple[Any, torch.device]] = {}
        self._places: list[tuple[Tensor, int, tuple[Any, ...]]] = []
        for one in tensors:
            storage = one.untyped_storage()
            key = storage.data_ptr()
            if key not in self._storages:
                moved = storage.clone() if one.device.type == "cpu" else storage.cpu()
                self._storages[key] = moved, one.device
            self._places.append((one, key, (one.storage_offset(), one.shape, one.stride())))
        for one, *_ in self._places:
            one.data = one.data.new_empty(0)

    def back(self) -> None:
        """All or none of them, so that it can be tried again."""
        made = {key: storage.to(device=device) for key, (storage, device) in self._storages.items()}
        for one, key, place in self._places:
            one.data = one.data.new_empty(0).set_(made[key], *place)


def tensors_in(part: Any) -> Iterator[Tensor]:
    """The tensors that an object holds, in its attributes and in collections, each once."""
    seen: set[int] = set()
    left = [part]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if not isinstance(one, Tensor):
            left += gc.get_referents(one)
        elif one.numel():
            yield one
