"""Rotation of queries and keys, the KV cache and attention, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.spec import FP8, FP8_MAX, AttentionParams


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] with its first R elements rotated. cos and sin [T, R], as in `rotate_and_store`."""
    turned, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    x1, x2 = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(1) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def store(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """cache.view(-1, H, D)[slots] = new. new [T, H, D]."""
    rows = cache.view(-1, *new.shape[1:])
    if cache.dtype == FP8:  # as bytes, as few operations support it; clamped, as overflow becomes NaN
        new, rows = new.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8), rows.view(torch.uint8)
    rows.index_copy_(0, slots, new.to(rows.dtype))


def gather(cache: Tensor, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The keys or values of a sequence's first tokens, [Hkv, length, D]."""
    used = blocks[: -(-length // cache.shape[1])].long()
    return cache[used].to(dtype).flatten(0, 1)[:length].transpose(0, 1)


def attend_sequence(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, kv_len: int, params: AttentionParams
) -> Tensor:
    """As `ReferenceOps.attend_one`. The G query heads of a key head become G * n rows, so that keys are not
    repeated.
    """
    count, num_heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    groups = num_heads // kv_heads
    k, v = (gather(cache, blocks, kv_len, q.dtype) for cache in (k_cache, v_cache))
    queries = q.view(count, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(kv_heads, groups * count, dim)
    keys = torch.arange(kv_len, device=q.device)
    last = torch.arange(kv_len - count, kv_len, device=q.device).unsqueeze(1)
    mask = keys <= last
    if params.window is not None:
        mask &= keys > last - params.window
    sinks = params.sinks
    if sinks is not None:
        sinks = sinks.view(kv_heads, groups, 1).expand(-1, -1, count).reshape(1, kv_heads, -1)
    mask = mask.repeat(groups, 1)
    mixed = attend(queries.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask, params, sinks)
    return mixed.view(kv_heads, groups, count, dim).permute(2, 0, 1, 3).reshape(count, num_heads, dim)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams, sinks: Tensor | None = None
) -> Tensor:
    """Masked softmax(scores) v over the last two dimensions. The mask includes the window.

    sinks: for each row of q, [..., rows]; None if params has none.
    """
    scale, softcap = params.scale, params.softcap
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q @ k.transpose(-1, -2)
    scores = scores * scale if softcap is None else softcap * torch.tanh(scores * (scale / softcap))
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if sinks is not None:
        own = sinks.float().unsqueeze(-1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, own), dim=-1)
    return torch.softmax(scores, dim=-1)[..., : k.shape[-2]].to(v.dtype) @ v
