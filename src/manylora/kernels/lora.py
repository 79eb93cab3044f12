"""Adds the deltas of adapters to the output of a linear layer, in plain PyTorch; and groups, on the host, the
pairs of token rows and experts by expert and by adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manylora.kernels.row_format import Encoding
from manylora.kernels.spec import FP8, ExpertPairs, LoraBatch, LoraRow, LoraSegment, Targets

NO_GROUPS = np.empty((0, 4), np.int64)


def add_adapters(
    y: Tensor, x: Tensor, batch: LoraBatch, layer: int, targets: Targets, bias: Tensor | None
) -> None:
    """As `ReferenceOps.lora_add`."""
    for segment in batch.segments:
        rows = x[segment.start : segment.stop]
        for target in targets:
            first = segment.rows.get((layer, target.module_id))
            columns = slice(target.start, target.start + target.width)
            out = y[segment.start : segment.stop, columns]
            if first is None:
                continue
            shift = bias[columns] if bias is not None else 0
            read = [matrices(batch.pool, row, x.shape[-1], target.width, x.dtype) for row in first.members]
            weights = [
                one.format.scale * (magnitude - 1)
                for one, (*_, magnitude) in zip(first.members, read, strict=True)
                if magnitude is not None and one.format.mixed
            ]
            if weights:
                out.copy_((out - shift) * (1 + sum(weights)) + shift)
            for row, (a, b, magnitude) in zip(first.members, read, strict=True):
                low, kind = rows @ a.T, row.format
                low = low if kind.scale == 1 else low * kind.scale
                if kind.shared:
                    of_b, of_d = batch.pool[row.vectors :][: target.width + kind.rank].split(
                        (target.width, kind.rank)
                    )
                    out += ((low * of_d.to(x.dtype)) @ b) * of_b.to(x.dtype)
                elif magnitude is not None and kind.mixed:
                    out += (low @ b) * magnitude
                else:
                    out.addmm_(low, b)
                    if magnitude is not None:
                        out.copy_((out - shift) * magnitude + shift)


def matrices(
    pool: Tensor, row: LoraRow, in_dim: int, out_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A [rank, in], B transposed [rank, out] and the DoRA magnitude [out] of a row."""
    stored = row.format.matrices if row.format.shared else row.format
    rank, sizes = row.format.rank, stored.sizes(in_dim, out_dim)
    numbers = as_encoded(pool, row.format.encoding)[row.offset : row.offset + sum(sizes)].to(dtype)
    a, b, magnitude = numbers.split(sizes)
    return a.view(rank, -1), b.view(rank, -1), magnitude if row.format.dora else None


def as_encoded(pool: Tensor, encoding: int) -> Tensor:
    """The pool as numbers of an `Encoding`."""
    return pool.view(FP8) if encoding == Encoding.FLOAT8 else pool


@dataclass(frozen=True)
class HostPairs(ExpertPairs):
    """starts: E + 1 host ints; the pairs starts[e]:starts[e+1] belong to expert e.

    groups: [G, 4] int64: runs of pairs of one expert and one adapter as start, stop, expert, index of the
    adapter among the batch's segments. Pairs outside all groups belong to the base model.
    """

    starts: Sequence[int]
    groups: np.ndarray


def pair_up(choices: Tensor, num_experts: int, lora: LoraBatch | None) -> tuple[HostPairs, Tensor]:
    """As `ReferenceOps.pair_up`. Waits for the device."""
    flat = choices.flatten()
    order = torch.argsort(flat, stable=True)
    rows = torch.div(order, choices.shape[1], rounding_mode="floor")
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    starts = [0, *torch.bincount(flat, minlength=num_experts).cumsum(0).tolist()]
    groups = NO_GROUPS if lora is None else _groups(rows.cpu().numpy(), starts, lora)
    return HostPairs(rows, starts, groups), places


def group_segments(
    batch: LoraBatch, groups: np.ndarray, layer: int, targets: Targets, in_dim: int
) -> tuple[LoraSegment, ...]:
    """Each group as a segment over the pairs, with its expert's matrices in place of the adapter's."""
    segments: list[LoraSegment] = []
    for start, stop, expert, number in groups.tolist():
        rows: dict[tuple[int, int], LoraRow] = {}
        for target in targets:
            key = (layer, target.module_id)
            row = batch.segments[number].rows.get(key)
            if row is not None:
                rows[key] = row.of_expert(expert, in_dim, target.width)
        if rows:
            segments.append(LoraSegment(start, stop, rows))
    return tuple(segments)


def _groups(rows: np.ndarray, starts: list[int], lora: LoraBatch) -> np.ndarray:
    """Runs of pairs with the same expert and the same adapter. Rows ascend within an expert, and an adapter's
    rows are adjacent, so every (expert, adapter) is one run."""
    begins = np.array([segment.start for segment in lora.segments])
    ends = np.array([segment.stop for segment in lora.segments])
    owner = np.searchsorted(begins, rows, side="right") - 1
    owner[(owner < 0) | (rows >= ends[owner])] = -1
    expert = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    change = np.flatnonzero((np.diff(owner) != 0) | (np.diff(expert) != 0)) + 1
    first = np.concatenate(([0], change))
    last = np.concatenate((change, [len(rows)]))
    groups = np.stack((first, last, expert[first], owner[first]), axis=1)
    return groups[groups[:, 3] >= 0]
