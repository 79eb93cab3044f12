"""Extras: trained weights of an adapter other than low-rank matrices (biases, norms, embedding, head).

They are views of the page pool and are used with plain PyTorch on any device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Extra:
    """A matrix [R, C] of one adapter (a vector has C = 1), stored in pieces of the pool.

    pool: flat. pieces: views of it, [rows, C] each; all but the last have `step` rows.
    starts: [pieces] int64 on the device, the offset of each piece in the pool.
    token_ids: [R] int64 on the device, ascending; the token of each row, if only rows of some tokens are
        trained.
    """

    pool: Tensor
    pieces: tuple[Tensor, ...]
    starts: Tensor
    token_ids: Tensor | None = None

    @property
    def step(self) -> int:
        return self.pieces[0].shape[0]

    @property
    def columns(self) -> int:
        return self.pieces[0].shape[1]

    def vector(self, dtype: torch.dtype) -> Tensor:
        """All values, flat, [R * C]."""
        parts = [piece.reshape(-1) for piece in self.pieces]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)

    def linear(self, x: Tensor) -> Tensor:
        """x [T, C] times the transposed matrix, [T, R]."""
        return torch.cat([F.linear(x, piece.to(x.dtype)) for piece in self.pieces], dim=1)

    def gather(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows by index, [T] int64 -> [T, C]. Does not wait for the device."""
        if len(self.pieces) == 1:
            return F.embedding(rows, self.pieces[0]).to(dtype)
        columns = torch.arange(self.columns, device=rows.device)
        piece = torch.div(rows, self.step, rounding_mode="floor")
        first = self.starts[piece] + (rows - piece * self.step) * len(columns)
        return self.pool[first.unsqueeze(1) + columns].to(dtype)


@dataclass(frozen=True)
class ExtraSegment:
    """Token rows [start, stop) of the batch use an adapter with these extras, by name.

    virtual: its rows that are virtual tokens: the row and the token's number, [V] int64 each. logits: which
    of the rows that need logits are in this segment, see `with_logits`.
    """

    start: int
    stop: int
    values: Mapping[str, Extra]
    logits: slice = field(default_factory=lambda: slice(0))
    virtual: tuple[Tensor, Tensor] | None = None


def with_logits(extras: Sequence[ExtraSegment], rows: Sequence[int]) -> tuple[ExtraSegment, ...]:
    """rows: rows that need logits, ascending, known on the host, so that no layer waits for the device."""
    return tuple(
        replace(one, logits=slice(bisect_left(rows, one.start), bisect_left(rows, one.stop)))
        for one in extras
    )
