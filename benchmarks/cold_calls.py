"""Time of small calls when the processor's caches are cold, as after the forward pass of a step.

    PYTHONPATH=src python benchmarks/cold_calls.py

Two calls are measured: the cosines and sines of positions, and the greedy token of each row of logits. Each
is measured as the engine does it on a CPU and with plain torch, in alternation. Prints the first quartile and
the median of the calling thread's CPU time, in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manylora.engine.sampler import Sampler
from manylora.engine.sequence import Sequence
from manylora.kernels.device import open_device
from manylora.kernels.spec import NOT_FINITE
from manylora.model.rope import Rope, RotaryTable
from manylora.request import Request, SamplingConfig

READ = 3 << 21  # float64 elements (50 MB) that are read before each call, to empty the caches
ROUNDS, VOCAB, DIM = 80, 8192, 64


def turned_by_torch(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = rope.angles(positions, None)
    return (angles.cos() * rope.factor).float(), (angles.sin() * rope.factor).float()


@torch.inference_mode()
def chosen_by_torch(logits: Tensor) -> Tensor:
    finite = torch.isfinite(logits.sum(dim=-1))
    return torch.where(finite, torch.from_numpy(logits.numpy().argmax(-1)), NOT_FINITE)


def main() -> None:
    torch.set_num_threads(2)
    memory = np.ones(READ)
    device, best = torch.device("cpu"), open_device("cpu").ops.best
    rope = Rope(1 / 10000 ** (torch.arange(0, DIM, 2) / DIM))
    table = RotaryTable(rope, torch.float32, device)
    for rows in (1, 16):
        positions, logits = torch.arange(rows) + 50, torch.randn(rows, VOCAB)
        asked = [Sequence(i, Request((0,), SamplingConfig()), 0, 9, None) for i in range(rows)]
        sampler = Sampler([(one, 1) for one in asked], VOCAB, device, best=best)
        calls: dict[str, Callable[[], Any]] = {
            "cosines and sines by torch": lambda at=positions: turned_by_torch(rope, at),  # type: ignore[misc]
            "cosines and sines": lambda at=positions: table.placed(at, None),  # type: ignore[misc]
            "a greedy token by torch": lambda of=logits: chosen_by_torch(of),  # type: ignore[misc]
            "a greedy token": lambda of=logits, by=sampler: by(of),  # type: ignore[misc]
        }
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                memory.sum()
                began = time.thread_time()
                call()
                taken[name].append(1e6 * (time.thread_time() - began))
        for name, times in taken.items():
            first, median, _ = quantiles(times, n=4)
            print(f"{rows:2} rows  {name:28s} {first:6.0f} {median:6.0f}", flush=True)


if __name__ == "__main__":
    main()
