"""Collectives: what ranks tell each other within a forward pass."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """Every rank of a group calls the same operations in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks of this stage, in the order of the ranks; the same bits on each."""

    def send_hidden(self, x: Tensor) -> None:
        """To the rank with the same part of the next stage."""

    def receive_hidden(self, rows: int, like: Tensor) -> Tensor:
        """[rows, hidden] of the stage before. like: a tensor [*, hidden] of the same type and device."""

    def logits(self, part: Tensor | None, rows: int, vocab: int) -> Tensor:
        """[rows, vocab] on rank 0, and [0, vocab] elsewhere; from the parts [rows, share] of the last stage's
        ranks, None on others."""

    def least(self, number: int) -> int:
        """The smallest number that any rank gives."""
