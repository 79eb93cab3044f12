"""What a forward pass gets: its input (ForwardBatch), the tensors of the KV cache, and recurrent states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from manylora.config.blocks import RecurrentConfig
from manylora.config.model import ModelConfig
from manylora.kernels.recurrent import RecurrentState, StateBatch
from manylora.kernels.spec import AttentionBatch, LoraBatch


@dataclass
class HiddenRows:
    """rows [P] int64, ascending. hidden [P, hidden]: after the final norm, written by the forward pass."""

    rows: Tensor
    hidden: Tensor | None = None


@dataclass
class Best:
    """tokens [L] int64: result of `best_tokens` on the logits, if the forward pass computes it anyway."""

    tokens: Tensor | None = None


@dataclass(frozen=True)
class ForwardBatch:
    """T token rows, packed over all sequences. input_ids, positions: [T] int64. logits_rows: [L] int64,
    ascending. rope_lengths: [T] int64, the lengths with which `dynamic` and `longrope` rotate; None:
    positions + 1. embeddings: rows [E] and vectors [E, hidden] in place of their tokens'. cross: pages and
    lengths of each sequence's cross-attention keys, without slots. state: locations of recurrent states;
    None: sequences start here, and none is kept. token_types: [T] int64; None: all 0. lora: None: no kernel.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    lora: LoraBatch | None
    logits_rows: Tensor
    embeddings: tuple[Tensor, Tensor] | None = None
    cross: AttentionBatch | None = None
    rope_lengths: Tensor | None = None
    state: StateBatch | None = None
    pooled: HiddenRows | None = None
    token_types: Tensor | None = None
    best: Best = field(default_factory=Best)


KvTensors = Tensor | tuple[Tensor, ...]
"""Per layer [planes, blocks, tokens_per_block, kv_heads, head_dim]. planes: keys and values, or latents."""


def make_kv(
    config: ModelConfig, blocks: int, tokens_per_block: int, make: Callable[[tuple[int, ...]], Tensor]
) -> KvTensors:
    """make: creates a tensor of a shape."""
    each = [(planes, blocks, tokens_per_block, *heads) for planes, *heads in config.kv_shapes]
    if len(set(each)) == 1:
        return make((len(each), *each[0]))
    return tuple(make(shape) for shape in each)


def token_numbers(config: ModelConfig) -> int:
    """Numbers per token in the cache, over all layers."""
    return sum(math.prod(shape) for shape in config.kv_shapes)


def copy_blocks(kv: KvTensors, source: Tensor, target: Tensor) -> None:
    """source, target: block numbers, int64."""
    if isinstance(kv, Tensor):
        kv[:, :, target] = kv[:, :, source]
        return
    for layer in kv:
        layer[:, target] = layer[:, source]


def num_block_bytes(kv: KvTensors) -> int:
    """Bytes of one block, over all layers."""
    return sum(part.nbytes for part in _parts(kv, 0))


def copy_block(kv: KvTensors, block: int, data: Tensor, *, store: bool) -> None:
    """Copy a block's content to data, or, unless `store`, from there. data: [block bytes] uint8, on the host.
    Nothing is waited for.
    """
    start = 0
    for part in _parts(kv, block):
        part = part.view(torch.uint8)
        flat = data[start : start + part.nbytes].view(part.shape)
        source, target = (part, flat) if store else (flat, part)
        if part.is_cpu:  # torch would start threads, which compete with those of a step
            np.copyto(target.numpy(), source.numpy())
        else:
            target.copy_(source, non_blocking=True)
        start += part.nbytes


def _parts(kv: KvTensors, block: int) -> list[Tensor]:
    """What a block has in each tensor."""
    return [kv[:, :, block]] if isinstance(kv, Tensor) else [layer[:, block] for layer in kv]


def make_states(config: RecurrentConfig, slots: int, device: torch.device) -> RecurrentState:
    return RecurrentState(
        *(torch.zeros(len(config.layers), slots, *shape, device=device) for shape in config.state_shapes)
    )


def passing_states(
    config: RecurrentConfig, starts: Sequence[int], device: torch.device
) -> tuple[RecurrentState, StateBatch]:
    """States for sequences that start with this batch and are not continued."""
    count = len(starts) - 1
    none, slots = torch.full((count,), -1, device=device), torch.arange(count, device=device)
    batch = StateBatch(torch.tensor(list(starts), device=device), none, slots, torch.zeros_like(slots), none)
    return make_states(config, count, device), batch
