"""Attention over paged keys and values: for decoding (split over the keys) and for prompts.

A program computes a tile of queries of one sequence for one key head. The query heads that share the key head
are rows of the tile, so keys are read once for all of them. For a decoding sequence the visible keys are
split into parts, depending only on its own length, so a result does not depend on other sequences. Each
part's program writes partial softmax sums, which a second kernel combines. A program beyond a sequence's
parts exits at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.arithmetic import _dot, _from_e4m3, as_bytes, widens
from manylora.kernels.cuda.launch import decode_blocks, launch, prompt_blocks
from manylora.kernels.cuda.tables import PagedBatch
from manylora.kernels.spec import FP8, AttentionParams

PIECE = 32  # elements of a wide float32 head that are multiplied at a time
PROGRAMS = 256  # target per decoding sequence: about two for each of a GPU's units
FEWEST_PARTS, MOST_PARTS = 16, 64
JOINED_PARTS = 16  # combined at a time


@triton.jit
def _span(
    kv_len, window, WINDOWED: tl.constexpr, PART_KEYS: tl.constexpr, MOST_PARTS: tl.constexpr
):  # fmt: skip
    """The first key that a sequence's last token may see, rounded down, and the keys of one part of those
    from there on: as many times PART_KEYS as gives at most MOST_PARTS parts."""
    low = 0
    if WINDOWED:
        low = tl.maximum(0, kv_len - window) // PART_KEYS * PART_KEYS
    return low, tl.maximum(1, tl.cdiv(kv_len - low, PART_KEYS * MOST_PARTS)) * PART_KEYS


@triton.jit(do_not_specialize=["table_stride", "num_parts"])
def _attend(
    q, k_cache, v_cache, out, part_out, part_top, part_sum, tiles, starts, kv_lens, table, sinks, scale,
    window, softcap, q_stride, table_stride, num_parts, PART_KEYS: tl.constexpr, MOST_PARTS: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, NARROW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PIECE_D: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    row = tl.load(starts + sequence)
    num_queries = tl.load(starts + sequence + 1) - row
    kv_len = tl.load(kv_lens + sequence)
    part_begin, part_end = 0, 0
    if SPLIT:
        low, length = _span(kv_len, window, WINDOWED, PART_KEYS, MOST_PARTS)
        part_begin = low + split * length
        part_end = part_begin + length
        if part_begin >= kv_len:
            return
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query, head = first + m // GROUP, kv_head * GROUP + m % GROUP
    valid = (m < QUERIES * GROUP) & (query < num_queries)
    before = kv_len - num_queries  # tokens of the sequence ahead of the step's first query
    position = before + query
    rows = (row + query).to(tl.int64)
    mine = valid[:, None] & (d < DIM)[None, :]
    from_q = q + rows[:, None] * q_stride + (head * DIM)[:, None]
    if PIECE_D == BLOCK_D:
        queries = tl.load(from_q + d[None, :], mask=mine, other=0)
    begin, end = 0, before + tl.minimum(first + QUERIES, num_queries)
    if WINDOWED:
        begin = tl.maximum(0, before + first - window + 1)
    if SPLIT:
        begin, end = tl.maximum(begin, part_begin), tl.minimum(end, part_end)
    begin = begin // BLOCK_N * BLOCK_N
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # counted in one of a sequence's parts
        top = tl.where(split == 0, tl.load(sinks + head, mask=valid, other=0), top)
        total += tl.where(split == 0, 1.0, 0.0)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        there = n < end
        page = tl.load(table + sequence.to(tl.int64) * table_stride + n // PAGE, mask=there, other=0)
        place = ((page.to(tl.int64) * PAGE + n % PAGE) * KV_HEADS + kv_head) * DIM
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for piece in tl.static_range(0, BLOCK_D, PIECE_D):
            e = piece + tl.arange(0, PIECE_D)
            if PIECE_D < BLOCK_D:  # read again for each block of keys: registers cannot hold them all
                some = valid[:, None] & (e < DIM)[None, :]
                queries = tl.load(from_q + e[None, :], mask=some, other=0, volatile=True)
            k_mask = (e < DIM)[:, None] & there[None, :]
            keys = tl.load(k_cache + place[None, :] + e[:, None], mask=k_mask, other=0)
            if NARROW:
                keys = _from_e4m3(keys).to(queries.dtype)
            scores = _dot(queries, keys, scores, WIDEN)
        scores *= scale
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
        at = (tile.to(tl.int64) * num_parts + split) * (KV_HEADS * GROUP) + head
        tl.store(part_out + at[:, None] * DIM + d[None, :], mixed, mask=mine)
        tl.store(part_top + at, top, mask=valid)
        tl.store(part_sum + at, total, mask=valid)
    else:
        to = out + (rows[:, None] * (KV_HEADS * GROUP) + head[:, None]) * DIM + d[None, :]
        answer = mixed / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(to, answer.to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["num_parts"])
def _join(
    out, part_out, part_top, part_sum, tiles, starts, kv_lens, window, num_parts, PART_KEYS: tl.constexpr,
    MOST_PARTS: tl.constexpr, WINDOWED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + tile * 2)
    row, kv_len = tl.load(starts + sequence).to(tl.int64), tl.load(kv_lens + sequence)
    low, length = _span(kv_len, window, WINDOWED, PART_KEYS, MOST_PARTS)
    count = tl.cdiv(kv_len - low, length)
    p, d = tl.arange(0, MOST_PARTS), tl.arange(0, BLOCK_D)
    first = tile.to(tl.int64) * num_parts
    tops = tl.load(part_top + (first + p) * HEADS + head, mask=p < count, other=float("-inf"))
    sums = tl.load(part_sum + (first + p) * HEADS + head, mask=p < count, other=0)
    top = tl.max(tops, axis=0)  # finite: a sequence's last token sees itself
    total = tl.sum(sums * tl.exp(tops - top), axis=0)
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for bottom in range(0, count, BLOCK_P):
        some = bottom + tl.arange(0, BLOCK_P)
        at = (first + some) * HEADS + head
        weights = tl.exp(tl.load(part_top + at, mask=some < count, other=float("-inf")) - top)
        inside = (some < count)[:, None] & (d < DIM)[None, :]
        values = tl.load(part_out + at[:, None] * DIM + d[None, :], mask=inside, other=0)
        mixed += tl.sum(values * weights[:, None], axis=0)
    answer = mixed / total
    tl.store(out + (row * HEADS + head) * DIM + d, answer.to(out.dtype.element_ty), mask=d < DIM)


def most_parts(kv_heads: int) -> int:
    """Maximum number of parts of a sequence, a power of two. With few key heads, more parts are needed to
    fill a GPU. Each part costs writing and reading a partial sum.
    """
    return min(MOST_PARTS, max(FEWEST_PARTS, 1 << max(1, PROGRAMS // kv_heads).bit_length() - 1))


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, params: AttentionParams
) -> Tensor:
    """As `ReferenceOps.attention`: any page size, head_dim up to 512, grouped heads, windows, soft caps,
    sinks, and FP8 caches, which are widened in registers. The last two dimensions of q must be contiguous.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch.single_tiles.shape[0]:
        _launch(out, q, k_cache, v_cache, batch, params, split=True)
    if batch.tiles.shape[0]:
        _launch(out, q, k_cache, v_cache, batch, params, split=False)
    return out


def _launch(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    *,
    split: bool,
) -> None:
    """split: for the sequences with one query, whose keys are split into parts; otherwise for the others."""
    heads, dim = q.shape[1:]
    page, kv_heads = k_cache.shape[1:3]
    block_d = max(16, triton.next_power_of_2(dim))
    if split:
        tiles, block_m = batch.single_tiles, max(16, triton.next_power_of_2(heads // kv_heads))
        blocks = decode_blocks(block_m, block_d, q.dtype)
        assert batch.part_keys % blocks.size == 0, "a block of keys lies in one part"
    else:
        start, stop, block_m = batch.tilings[kv_heads, dim]
        tiles, blocks = batch.tiles[start:stop], prompt_blocks(block_m, block_d, q.dtype)
    window, softcap = params.window, params.softcap
    keys = batch.max_keys if window is None else min(batch.max_keys, window + batch.part_keys)
    parts = min(most_parts(kv_heads), -(-keys // batch.part_keys)) if split else 1
    size = (tiles.shape[0], parts, heads) if split else (0,)
    part_top, part_sum = (torch.empty(size, dtype=torch.float32, device=q.device) for _ in "ab")
    part_out = torch.empty((*size, dim), dtype=torch.float32, device=q.device)
    shared = {
        "PART_KEYS": batch.part_keys, "MOST_PARTS": most_parts(kv_heads), "WINDOWED": window is not None,
        "DIM": dim, "BLOCK_D": block_d,
    }  # fmt: skip
    launch(
        _attend, (tiles.shape[0], kv_heads, parts), q, as_bytes(k_cache), as_bytes(v_cache), out, part_out,
        part_top, part_sum, tiles, batch.starts, batch.lengths, batch.block_table,
        q if params.sinks is None else params.sinks, params.scale, window or 0, softcap or 1.0, q.stride(0),
        batch.block_table.stride(0), parts,
        **shared,
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, PAGE=page, CAPPED=softcap is not None,
        SINKS=params.sinks is not None, NARROW=k_cache.dtype == FP8, SPLIT=split, BLOCK_M=block_m,
        BLOCK_N=blocks.size, PIECE_D=min(PIECE, block_d) if blocks.in_pieces else block_d,
        WIDEN=widens(q.dtype), **blocks.options,
    )  # fmt: skip
    if split:
        launch(
            _join, (tiles.shape[0], heads), out, part_out, part_top, part_sum, tiles, batch.starts,
            batch.lengths, window or 0, parts, HEADS=heads, BLOCK_P=JOINED_PARTS, **shared,
        )  # fmt: skip
