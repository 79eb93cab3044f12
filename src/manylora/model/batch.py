"""What a forward pass gets: its input (ForwardBatch), and the tensors of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from manylora.config.model import ModelConfig
from manylora.kernels.recurrent import StateBatch
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
    None: each sequence starts here, and none is kept. token_types: [T] int64; None: all 0. lora: None: no
    LoRA kernel runs.
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
