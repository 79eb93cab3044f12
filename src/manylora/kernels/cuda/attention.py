"""Attention over paged keys and values: for decoding, split over the keys, and for prompts.

A program computes a tile of queries of one sequence for one key head. The query heads that share the key head
are rows of the tile, so keys are read once for all. Split programs write partial softmax sums, which a second
kernel joins. A split is a fixed number of keys, so a result does not depend on the other sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.blocks import BlockChooser, Blocks
from manylora.kernels.cuda.fp8 import FP8, _from_e4m3, as_bytes
from manylora.kernels.cuda.interpreter import _dot, widens
from manylora.kernels.cuda.tables import PagedBatch
from manylora.kernels.spec import AttentionParams

# Keys that a program reads at a time. The first is the default, where nothing was measured.
DECODE = (Blocks(32), Blocks(64), Blocks(64, stages=2), Blocks(128, stages=2))
PROMPTS = (Blocks(32), Blocks(64, stages=2))
WIDE_PROMPTS = (Blocks(32, warps=8), Blocks(64, warps=8, stages=2))  # of heads over 128 elements


@triton.jit
def _attend(
    q, k_cache, v_cache, out, part_out, part_top, part_sum, tiles, starts, kv_lens, table, scale, window,
    softcap, split_keys, q_stride, table_stride, num_splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, NARROW: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    row = tl.load(starts + sequence)
    num_queries = tl.load(starts + sequence + 1) - row
    kv_len = tl.load(kv_lens + sequence)
    if SPLIT:  # noqa: SIM102 - a compile-time branch around a run-time one
        if split * split_keys >= kv_len:
            return
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query, head = first + m // GROUP, kv_head * GROUP + m % GROUP
    valid = (m < QUERIES * GROUP) & (query < num_queries)
    before = kv_len - num_queries  # tokens of the sequence ahead of the step's first query
    position = before + query
    rows = (row + query).to(tl.int64)
    mine = valid[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + rows[:, None] * q_stride + (head * DIM)[:, None] + d[None, :], mask=mine, other=0)
    begin, end = 0, before + tl.minimum(first + QUERIES, num_queries)
    if WINDOWED:
        begin = tl.maximum(0, before + first - window + 1)
    if SPLIT:
        begin = tl.maximum(begin, split * split_keys)
        end = tl.minimum(end, (split + 1) * split_keys)
    begin = begin // BLOCK_N * BLOCK_N
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        there = n < end
        page = tl.load(table + sequence.to(tl.int64) * table_stride + n // PAGE, mask=there, other=0)
        place = ((page.to(tl.int64) * PAGE + n % PAGE) * KV_HEADS + kv_head) * DIM
        k_mask = (d < DIM)[:, None] & there[None, :]
        keys = tl.load(k_cache + place[None, :] + d[:, None], mask=k_mask, other=0)
        if NARROW:
            keys = _from_e4m3(keys).to(queries.dtype)
        scores = _dot(queries, keys, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDEN) * scale
        if CAPPED:  # tanh by way of the logistic function, which overflows on neither side
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        seen = there[None, :] & (n[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (n[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no infinity minus infinity
        weights = tl.exp(scores - base[:, None])
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(weights, axis=1)
        v_mask = there[:, None] & (d < DIM)[None, :]
        values = tl.load(v_cache + place[:, None] + d[None, :], mask=v_mask, other=0)
        if NARROW:
            values = _from_e4m3(values).to(queries.dtype)
        mixed = mixed * fade[:, None]
        mixed = _dot(weights.to(values.dtype), values, mixed, WIDEN)
        top = higher
    if SPLIT:
        at = (tile.to(tl.int64) * num_splits + split) * (KV_HEADS * GROUP) + head
        tl.store(part_out + at[:, None] * DIM + d[None, :], mixed, mask=mine)
        tl.store(part_top + at, top, mask=valid)
        tl.store(part_sum + at, total, mask=valid)
    else:
        to = out + (rows[:, None] * (KV_HEADS * GROUP) + head[:, None]) * DIM + d[None, :]
        answer = mixed / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(to, answer.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _join(
    out, part_out, part_top, part_sum, tiles, starts, kv_lens, split_keys, num_splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + tile * 2)
    row, kv_len = tl.load(starts + sequence).to(tl.int64), tl.load(kv_lens + sequence)
    d = tl.arange(0, BLOCK_D)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for split in range(tl.cdiv(kv_len, split_keys)):
        at = (tile.to(tl.int64) * num_splits + split) * HEADS + head
        part = tl.load(part_top + at + tl.arange(0, 1))
        higher = tl.maximum(top, part)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp(top - base), tl.exp(part - base)
        total = total * fade + tl.load(part_sum + at) * weight
        values = tl.load(part_out + at * DIM + d, mask=d < DIM, other=0)
        mixed = mixed * fade + values * weight
        top = higher
    answer = mixed / tl.where(total == 0, 1.0, total)
    tl.store(out + (row * HEADS + head) * DIM + d, answer.to(out.dtype.element_ty), mask=d < DIM)


class PagedAttention:
    """Our own kernel: any page size, head_dim up to 256, grouped heads, windows, soft caps, and FP8 caches,
    which are widened in registers. chooser: of block sizes."""

    name = "our own kernel in the Triton language"

    def __init__(self, chooser: BlockChooser | None = None) -> None:
        self._chooser = chooser or BlockChooser()

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, params: AttentionParams
    ) -> Tensor:
        """As `ReferenceOps.attention`; the last two dimensions of q are contiguous."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if batch.single_tiles.shape[0]:
            self._launch(out, q, k_cache, v_cache, batch, params, split=True)
        if batch.tiles.shape[0]:
            self._launch(out, q, k_cache, v_cache, batch, params, split=False)
        return out

    def _launch(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        params: AttentionParams,
        *,
        split: bool,
    ) -> None:
        heads, dim = q.shape[1:]
        page, kv_heads = k_cache.shape[1:3]
        tiles = batch.single_tiles if split else batch.tiles
        splits = batch.num_splits if split else 1
        size = (tiles.shape[0], splits, heads) if split else (0,)
        part_top, part_sum = (torch.empty(size, dtype=torch.float32, device=q.device) for _ in "ab")
        part_out = torch.empty((*size, dim), dtype=torch.float32, device=q.device)
        block_d = max(16, triton.next_power_of_2(dim))
        block_m = max(16, triton.next_power_of_2(heads // kv_heads)) if split else batch.block_rows
        window, softcap = params.window, params.softcap

        def launch(blocks: Blocks) -> None:
            _attend[(tiles.shape[0], kv_heads, splits)](
                q, as_bytes(k_cache), as_bytes(v_cache), out, part_out, part_top, part_sum, tiles,
                batch.starts, batch.lengths, batch.block_table, params.scale, 0 if window is None else window,
                1.0 if softcap is None else softcap, batch.split_keys, q.stride(0),
                batch.block_table.stride(0), splits,
                GROUP=heads // kv_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, WINDOWED=window is not None,
                CAPPED=softcap is not None, NARROW=k_cache.dtype == FP8, SPLIT=split, BLOCK_M=block_m,
                BLOCK_N=blocks.size, BLOCK_D=block_d, WIDEN=widens(q.dtype), num_warps=blocks.warps,
                num_stages=blocks.stages,
            )  # fmt: skip

        if split:  # a block lies in one of the parts
            candidates = tuple(blocks for blocks in DECODE if batch.split_keys % blocks.size == 0)
        else:
            candidates = WIDE_PROMPTS if block_m * block_d > 2**13 else PROMPTS
        kind = f"attention {'decoding' if split else 'prompts'} {q.dtype} cache {k_cache.dtype}"
        shape = f"{kind} heads {heads} {kv_heads} dim {dim} page {page}"
        launch(self._chooser.choose(shape, candidates, launch))
        if split:
            _join[(tiles.shape[0], heads)](
                out, part_out, part_top, part_sum, tiles, batch.starts, batch.lengths, batch.split_keys,
                splits, HEADS=heads, DIM=dim, BLOCK_D=block_d,
            )  # fmt: skip
