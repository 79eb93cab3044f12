"""Which rows go to which experts, decided on the device. The host never learns any count.

Tables have the size of the worst case for their shape, so that a step can be recorded. A tile of 0 rows exits
at once. A run is the pairs of one expert, or of one expert with one adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.launch import launch
from manylora.kernels.cuda.plan import TILE, expert_tile_size, tile_size_of
from manylora.kernels.cuda.tables import PlannedLora
from manylora.kernels.spec import ExpertPairs

BLOCK = 1024


@dataclass(frozen=True)
class DevicePairs(ExpertPairs):
    """tiles [n, TILE] int32: first pair, pairs, unused, expert; tile_size: the most pairs of one.

    lora_tiles [n, TILE] int32: first pair, pairs, slot of the adapter, expert; empty without adapters.
    lora_tile_size: the most pairs of one.
    """

    tiles: Tensor = field(default_factory=lambda: torch.empty(0))
    tile_size: int = 16
    lora_tiles: Tensor = field(default_factory=lambda: torch.empty(0))
    lora_tile_size: int = 1


@triton.jit(do_not_specialize=["num_pairs"])
def _pair(
    order, row_slots, rows, places, slots, num_pairs, TOP_K: tl.constexpr, ADAPTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    choice = tl.load(order + pair, mask=inside, other=0)
    row = choice // TOP_K
    tl.store(rows + pair, row, mask=inside)
    tl.store(places + choice, pair.to(tl.int64), mask=inside)
    if ADAPTED:
        tl.store(slots + pair, tl.load(row_slots + row, mask=inside, other=-1), mask=inside)


@triton.jit
def _later(left, right):
    return tl.maximum(left, right)


@triton.jit(do_not_specialize=["num_pairs"])
def _tile(
    experts, slots, tiles, num_pairs, SIZE: tl.constexpr, ADAPTED: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    made = 0
    run = 0  # where the run began that the last block ended in
    for low in range(0, num_pairs, BLOCK):
        pair = low + tl.arange(0, BLOCK)
        inside = pair < num_pairs
        expert = tl.load(experts + pair, mask=inside, other=-1).to(tl.int32)
        first = expert != tl.load(experts + pair - 1, mask=inside & (pair > 0), other=-1).to(tl.int32)
        last = expert != tl.load(experts + pair + 1, mask=pair + 1 < num_pairs, other=-1).to(tl.int32)
        slot = tl.zeros([BLOCK], tl.int32)
        if ADAPTED:
            slot = tl.load(slots + pair, mask=inside, other=-1)
            first = first | (slot != tl.load(slots + pair - 1, mask=inside & (pair > 0), other=-2))
            last = last | (slot != tl.load(slots + pair + 1, mask=pair + 1 < num_pairs, other=-2))
        began = tl.associative_scan(tl.where(first & inside, pair, run), 0, _later)
        place = (pair - began) % SIZE
        wanted = inside & (slot >= 0)
        opens = (wanted & (place == 0)).to(tl.int32)
        closes = wanted & (last | (place == SIZE - 1))
        to = tiles + (made + tl.cumsum(opens, axis=0) - 1) * TILE
        tl.store(to, pair, mask=opens != 0)
        tl.store(to + 1, place + 1, mask=closes)
        tl.store(to + 2, slot, mask=opens != 0)
        tl.store(to + 3, expert, mask=opens != 0)
        made += tl.sum(opens, axis=0)
        run = tl.max(began, axis=0)


def pair_up(choices: Tensor, num_experts: int, lora: PlannedLora | None) -> tuple[DevicePairs, Tensor]:
    """As `ReferenceOps.pair_up`. choices [T, k] int64, contiguous."""
    flat = choices.flatten()
    num_pairs, device = len(flat), flat.device
    experts, order = torch.sort(flat, stable=True)
    rows, places = torch.empty_like(order), torch.empty_like(order)
    adapted = lora is not None
    slots = torch.empty(num_pairs if adapted else 0, dtype=torch.int32, device=device)
    launch(
        _pair, (triton.cdiv(num_pairs, BLOCK),), order, lora.row_slots if lora is not None else slots, rows,
        places, slots, num_pairs,
        TOP_K=choices.shape[1], ADAPTED=adapted, BLOCK=BLOCK,
    )  # fmt: skip
    runs = min(num_pairs, num_experts)
    size = expert_tile_size(num_pairs / runs)
    pairs = DevicePairs(rows, _tiles(experts, slots, runs, size, adapted=False), size)
    if lora is None:
        return pairs, places
    runs = min(num_pairs, num_experts * lora.most_adapters)
    size = tile_size_of(num_pairs / runs)
    lora_tiles = _tiles(experts, slots, runs, size, adapted=True)
    return DevicePairs(rows, pairs.tiles, pairs.tile_size, lora_tiles, size), places


def _tiles(experts: Tensor, slots: Tensor, most_runs: int, size: int, *, adapted: bool) -> Tensor:
    """[n, TILE] int32, with n large enough for any such pairs: each run has at most one partial tile."""
    most = len(experts) // size + most_runs
    tiles = torch.zeros((min(most, len(experts)), TILE), dtype=torch.int32, device=experts.device)
    options = {"SIZE": size, "ADAPTED": adapted, "TILE": TILE, "BLOCK": BLOCK}
    launch(_tile, (1,), experts, slots, tiles, len(experts), **options)
    return tiles
