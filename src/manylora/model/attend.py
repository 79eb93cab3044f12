"""Attention of encoder-decoder models in plain PyTorch: bidirectional, or with a bias on the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.spec import AttentionBatch

SOME_QUERIES = 64  # minimum number of queries per operation


class RelativeBias:
    """T5's bias on attention scores: weight [buckets, heads]. max_distance: larger ones share a bucket.
    longest: tokens of a sequence. both_ways: half of the buckets are for later keys, as in an encoder.
    """

    def __init__(self, weight: Tensor, max_distance: int, longest: int, both_ways: bool) -> None:
        self._zero = longest - 1
        distances = torch.arange(-self._zero, longest)
        buckets = _buckets(distances, weight.shape[0], max_distance, both_ways)
        self._by_distance = weight[buckets.to(weight.device)].T.contiguous()  # [heads, 2 * longest - 1]

    def __call__(self, distances: Tensor) -> Tensor:
        """distances: int64, key position minus query position; [...] -> [heads, ...]."""
        return self._by_distance[:, distances + self._zero]


@dataclass(frozen=True)
class PagedGroup:
    """G sequences whose attention is one operation, with n query rows each, over m keys. rows: [G, n].
    padding: [G, m], True after a sequence's end. mask: [G, 1 or heads, n, m], added to the scores.
    """

    rows: Tensor
    blocks: Tensor
    num_keys: int
    padding: Tensor | None
    mask: Tensor | None


def attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Sequence[int],
    scale: float,
    bias: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Full attention within each sequence, or with a window attention to tokens less than `window` apart.

    Semantics, for rows r = starts[s]:starts[s+1]: softmax(scale * q[r] k[r].T + bias[:, :n, :n]) v[r]
    q [T, Hq, D], k, v [T, H, D]; bias [H, longest, longest] or None, and none with a window -> [T, Hq, D].
    """
    out, shared = torch.empty_like(q), q.shape[1] != k.shape[1]
    for start, stop in pairwise(starts):
        count = stop - start
        queries, keys, values = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        # With a window, process some queries at a time with the keys that they see. Otherwise all at once.
        step = count if window is None else max(window, SOME_QUERIES)
        for first in range(0, count, step):
            last = min(count, first + step)
            low, high = (0, count) if window is None else (max(0, first - window + 1), last + window - 1)
            mask = None if bias is None else bias[:, :count, :count].unsqueeze(0)
            if window is not None:
                places = torch.arange(count, device=q.device)
                mask = (places[low:high] - places[first:last, None]).abs() < window
            mixed = F.scaled_dot_product_attention(
                queries[:, :, first:last],
                keys[:, :, low:high],
                values[:, :, low:high],
                attn_mask=mask,
                scale=scale,
                enable_gqa=shared,
            )
            out[start + first : start + last] = mixed[0].transpose(0, 1)
    return out


def attend_groups(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Sequence[PagedGroup], scale: float
) -> Tensor:
    """q [T, H, D], caches [blocks, tokens_per_block, H, D] of one layer -> [T, H, D]."""
    out = torch.empty_like(q)
    for group in groups:
        k, v = (
            cache[group.blocks].to(q.dtype).flatten(1, 2)[:, : group.num_keys] for cache in (k_cache, v_cache)
        )
        if group.padding is not None:  # blocks of other sequences: 0 * NaN would be NaN
            k, v = (x.masked_fill(group.padding[..., None, None], 0) for x in (k, v))
        mixed = F.scaled_dot_product_attention(
            q[group.rows].transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=group.mask,
            scale=scale,
        )
        out[group.rows] = mixed.transpose(1, 2)
    return out


def paged_groups(
    batch: AttentionBatch,
    tokens_per_block: int,
    dtype: torch.dtype,
    bias: RelativeBias | None = None,
    causal: bool = False,
) -> list[PagedGroup]:
    """Sequences with one query row are one group, others one each. causal: rows do not see later ones."""
    sequences = list(enumerate(pairwise(batch.query_starts)))
    single = [s for s, (start, stop) in sequences if stop - start == 1]
    others = [[s] for s, (start, stop) in sequences if stop - start > 1]
    device, groups = batch.block_table.device, []
    for members in [single, *others] if single else others:
        firsts = torch.tensor([batch.query_starts[s] for s in members])
        count = batch.query_starts[members[0] + 1] - batch.query_starts[members[0]]
        lengths = [batch.kv_lens[s] for s in members]
        longest = max(lengths)
        keys, ends = torch.arange(longest), torch.tensor(lengths).unsqueeze(1)
        positions = ends - count + torch.arange(count)  # [G, n], of the queries
        distances = keys - positions.unsqueeze(2)  # [G, n, m]
        padding = keys >= ends
        hidden = padding.unsqueeze(1) if not causal else distances > 0
        mask = None
        if bias is not None:
            mask = bias(distances.to(device)).transpose(0, 1).to(dtype)
        if hidden.any():
            base = torch.zeros((), dtype=dtype, device=device) if mask is None else mask
            mask = torch.where(hidden.unsqueeze(1).to(device), float("-inf"), base)
        rows = (firsts.unsqueeze(1) + torch.arange(count)).to(device)
        tables = batch.block_table[torch.tensor(members, device=device), : -(-longest // tokens_per_block)]
        cut = padding.to(device) if padding.any() else None
        groups.append(PagedGroup(rows, tables.long(), longest, cut, mask))
    return groups


def _buckets(distances: Tensor, count: int, max_distance: int, both_ways: bool) -> Tensor:
    """The first half of the buckets have one distance each; the others grow logarithmically. In float32 and
    in the training code's order of operations, because rounding decides between two buckets.
    """
    later = torch.zeros_like(distances)
    if both_ways:
        count //= 2
        later, far = (distances > 0) * count, distances.abs()
    else:
        far = (-distances).clamp_(min=0)
    exact = count // 2
    steps = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (count - exact)
    wide = (exact + steps.to(torch.long)).clamp_(max=count - 1)
    return later + torch.where(far < exact, far, wide)
