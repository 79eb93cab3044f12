"""Compares the low-rank work of a mix of adapters with the same adapters on separate rows, and with a scale.

    python benchmarks/mixes.py

Uses decoder layers of 2048 x 5632, with float32 adapters of rank 16 on every linear layer. All adapters
together are larger than the processor's caches. The two variants of a line alternate. Each time is the median
of minima.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from manylora.kernels.device import open_device
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment, LoraTarget
from manylora.lora.loaded import LoadedAdapter

HIDDEN, KV, INNER, RANK, LAYERS, MEMBERS = 2048, 512, 5632, 16, 6, 4
LINEARS = (  # inputs, then the id and the outputs of each module
    (HIDDEN, ((1, HIDDEN), (2, KV), (3, KV))),
    (HIDDEN, ((4, HIDDEN),)),
    (HIDDEN, ((5, INNER), (7, INNER))),
    (INNER, ((6, HIDDEN),)),
)
ROUNDS, REPEATS = 9, 5
Rows = dict[tuple[int, int], LoraRow]


def adapters(count: int) -> tuple[torch.Tensor, list[Rows]]:
    """A pool, and the rows of each adapter in it."""
    found, used = [dict[tuple[int, int], LoraRow]() for _ in range(count)], 0
    for rows in found:
        for layer in range(LAYERS):
            for inputs, modules in LINEARS:
                for module, outputs in modules:
                    rows[layer, module] = LoraRow(used, RowFormat(RANK))
                    used += RANK * (inputs + outputs)
    return torch.randn(used) / 100, found


def best(run: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def pass_of(pool: torch.Tensor, segments: list[LoraSegment]) -> Callable[[], None]:
    """The low-rank work of one step."""
    ops, batch = open_device("cpu").ops, LoraBatch(pool, tuple(segments))
    calls = []
    for inputs, modules in LINEARS:
        targets, column = [], 0
        for module, outputs in modules:
            targets.append(LoraTarget(module, column, outputs))
            column += outputs
        rows = segments[-1].stop
        calls.append((torch.zeros(rows, column), torch.randn(rows, inputs), tuple(targets)))

    def run() -> None:
        for layer in range(LAYERS):
            for y, x, targets in calls:
                ops.lora_add(y, x, batch, layer, targets)

    return run


def compare(title: str, one: Callable[[], None], other: Callable[[], None]) -> None:
    one(), other()
    pairs = [(best(one), best(other)) for _ in range(ROUNDS)]
    ours, theirs = (1e3 * median(times) for times in zip(*pairs, strict=True))
    ratio = median(a / b for a, b in pairs)
    print(f"{title:58} {ours:8.3f} ms {theirs:8.3f} ms  {ratio:5.2f}")


def main() -> None:
    torch.manual_seed(0)
    for count in (1, 8):
        pool, rows = adapters(MEMBERS * count)
        single = [LoraSegment(n, n + 1, one) for n, one in enumerate(rows)]
        mixed = []
        for n in range(count):
            members = [(LoadedAdapter(one, {}), 0.5) for one in rows[MEMBERS * n : MEMBERS * (n + 1)]]
            mixed.append(LoraSegment(n, n + 1, LoadedAdapter.mixed(members).rows))
        title = f"{count} rows of a mix of {MEMBERS}, {MEMBERS * count} rows of one adapter"
        compare(title, pass_of(pool, mixed), pass_of(pool, single))
        scaled = [
            replace(one, rows=LoadedAdapter.mixed([(LoadedAdapter(dict(one.rows), {}), 0.7)]).rows)
            for one in single
        ]
        title = f"{len(single)} rows of one adapter with a scale, and without"
        compare(title, pass_of(pool, scaled), pass_of(pool, single))


if __name__ == "__main__":
    main()
