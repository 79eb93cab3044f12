"""Collectives: communication between ranks within a forward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from manylora.ranks.mapping import Mapping


class Collectives:
    """Uses torch's process group. All ranks of a stage call the same operations in the same order."""

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self.mapping, self._device = mapping, device
        self._size = mapping.tp_size
        stages = [mapping.at(stage * mapping.tp_size).tp_group for stage in range(mapping.pp_size)]
        groups = [dist.new_group(ranks) for ranks in stages]
        self._group = groups[mapping.pp_rank]
        self._leader = mapping.tp_group[0]

    def sum(self, x: Tensor) -> Tensor:
        """Over this stage's ranks, in rank order. All-reduce's order depends on the rows beside one."""
        if self._size == 1:
            return x
        parts = torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_single(parts.view(-1), x.contiguous().view(-1), self._group)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """x of each rank in this stage, on its first rank; None on others. Equal shapes on all ranks."""
        if self._size == 1:
            return [x]
        x = x.contiguous()
        leads = self.mapping.tp_rank == 0
        parts = [torch.empty_like(x) for _ in range(self._size)] if leads else None
        dist.gather(x, parts, self._leader, self._group)
        return parts

    def send_hidden(self, x: Tensor) -> None:
        dist.send(x.contiguous(), self.mapping.rank + self._size)

    def receive_hidden(self, x: Tensor) -> Tensor:
        """Receive into x from the rank with the same part in the previous stage. Returns x."""
        dist.recv(x, self.mapping.rank - self._size)
        return x

    def from_last(self, x: Tensor) -> Tensor:
        """x of the rank with the same part in the last stage, received into x on other ranks. Returns x."""
        mapping = self.mapping
        last = mapping.world_size - self._size + mapping.tp_rank
        if not mapping.is_last_stage:
            dist.recv(x, last)
            return x
        x = x.contiguous()
        for rank in range(mapping.tp_rank, last, self._size):
            dist.send(x, rank)
        return x

    def send_back(self, x: Tensor) -> None:
        """Send logits or hidden states to rank 0, from the first rank of the last stage."""
        dist.send(x.contiguous(), 0)

    def receive_back(self, x: Tensor) -> Tensor:
        """Receive into x, on rank 0. Returns x."""
        mapping = self.mapping
        dist.recv(x, (mapping.pp_size - 1) * mapping.tp_size)
        return x

    def least(self, number: int) -> int:
        given = torch.tensor([number], device=self._device)
        dist.all_reduce(given, dist.ReduceOp.MIN)
        return int(given)
