"""The tensors of the KV cache: one for all layers if they are equal, otherwise one per layer."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from manylora.config.model import ModelConfig

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
