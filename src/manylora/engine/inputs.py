"""StepInputs: one forward pass as the host knows it, before any device does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from manylora.kernels.spec import AttentionBatch, LoraBatch, Ops
from manylora.kernels.transfer import upload
from manylora.model.batch import ForwardBatch

__all__ = ["Pending", "StepInputs"]


@dataclass(frozen=True)
class Pending:
    """Tokens that only the device knows: rows [P] of a step, and of each its place in `tokens` [D]."""

    rows: list[int]
    places: list[int]
    tokens: Tensor


@dataclass(frozen=True)
class StepInputs:
    """T rows of S sequences. Filled by the runner.

    input_ids, positions, slots: [T]. starts: [S + 1], lengths: [S], as `AttentionBatch` has them.
    blocks: [S], the KV blocks each sequence uses. logits_rows: rows whose logits are wanted.
    cross_lengths, cross_blocks: [S], of what an encoder made; empty without one.
    pending: tokens that `fill` has to write; 0 in input_ids.
    """

    input_ids: list[int]
    positions: list[int]
    starts: list[int]
    lengths: list[int]
    blocks: list[list[int]]
    slots: list[int]
    logits_rows: list[int]
    lora: LoraBatch | None = None
    embeddings: tuple[Tensor, Tensor] | None = None
    cross_lengths: list[int] = field(default_factory=list)
    cross_blocks: list[list[int]] = field(default_factory=list)
    pending: Pending | None = None

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one row, and its logits are wanted: what a recorded graph can do.

        Not with extras of adapters, whose shapes and places a graph would have to know.
        """
        rows = len(self.input_ids)
        plain = self.embeddings is None and not (self.lora and self.lora.extras)
        return plain and rows == len(self.lengths) == len(self.logits_rows)

    def pad(self, rows: int) -> StepInputs:
        """The same with sequences of one token behind it, which store nothing, up to that many rows."""
        count = rows - len(self.input_ids)
        return replace(
            self,
            input_ids=self.input_ids + [0] * count,
            positions=self.positions + [0] * count,
            starts=[*self.starts, *range(len(self.input_ids) + 1, rows + 1)],
            lengths=self.lengths + [1] * count,
            blocks=self.blocks + [[0]] * count,
            slots=self.slots + [-1] * count,
            logits_rows=self.logits_rows + list(range(len(self.input_ids), rows)),
        )

    def plan(self, ops: Ops, width: int = 0, fixed: bool = False) -> ForwardBatch:
        """The tables, still on the host. width: of the block table, 0 for what the longest sequence needs."""
        attention = AttentionBatch(
            query_starts=self.starts,
            kv_lens=self.lengths,
            block_table=_table(self.blocks, width),
            slots=_int(self.slots),
        )
        planned, lora = ops.plan(attention, self.lora, fixed)
        return ForwardBatch(
            input_ids=_int(self.input_ids),
            positions=_int(self.positions),
            attention=planned,
            lora=lora,
            logits_rows=_int(self.logits_rows),
            cross=self._cross(),
        )

    def fill(self, input_ids: Tensor) -> None:
        """Write the pending tokens over their zeros, on the device. A broken row's is taken as 0."""
        if self.pending is None:
            return
        where = upload([self.pending.rows, self.pending.places], torch.long, input_ids.device)
        tokens = self.pending.tokens.index_select(0, where[1]).clamp_(min=0)
        input_ids.index_copy_(0, where[0], tokens)

    def _cross(self) -> AttentionBatch | None:
        if not self.cross_blocks:
            return None
        return AttentionBatch(self.starts, self.cross_lengths, _table(self.cross_blocks), _int([]))


def _table(rows: list[list[int]], width: int = 0) -> Tensor:
    """[S, width] int32, ending in zeros. width: 0 for what the longest row needs."""
    width = width or max(map(len, rows))
    return _int([blocks + [0] * (width - len(blocks)) for blocks in rows], dtype=torch.int32)


def _int(values: list, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.tensor(values, dtype=dtype)
