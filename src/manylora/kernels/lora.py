"""Adds the deltas of adapters to the output of a linear layer, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from manylora.kernels.row_format import Encoding
from manylora.kernels.spec import FP8, LoraBatch, LoraRow, Targets


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
