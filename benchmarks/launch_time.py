"""Measures the host time of eager kernel launches, as in a step with a prompt. No GPU is needed.

    PYTHONPATH=src python benchmarks/launch_time.py

Compares triton's own launch with ours for the kernels of one layer with adapters. Prints the minimum of many
calls, in microseconds. A stub replaces the driver (`gpu_fake.py`); the real one takes a few microseconds more
per launch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_fake import install

REPEATS = 300
SHAPE = (512, 1024, 1, 8, 2, 64, 64)  # in the order of gpu_world.SHAPES; launch times do not depend on it


def least(call: Callable[[], object]) -> float:
    """Minimum time of a call in microseconds."""
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - began)
    return min(taken) / 1e3


def launches(folder: Path) -> list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """The launches of a step with seven decode rows, a prompt and three adapters."""
    install(folder)
    import gpu_world
    import torch

    from manylora.kernels.cuda import attention, kv, lora, rows
    from manylora.kernels.cuda.launch import launch
    from manylora.kernels.cuda.ops import CudaOps
    from manylora.kernels.device import Device

    torch.set_num_threads(1)
    gpu_world.SHAPES["tiny"] = SHAPE
    gpu_world.World._pool = lambda self: torch.zeros(2**24, dtype=self.dtype)
    device = Device(torch.device("cpu"), CudaOps(), "none", lambda function: function)
    world = gpu_world.World("tiny", device, torch.bfloat16, 128, 1000)
    found = []

    def noted(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        found.append((kernel, grid, arguments, constants))
        launch(kernel, grid, *arguments, **constants)

    for module in (attention, kv, lora, rows):
        module.launch = noted
    lengths = [1] * 7 + [100]
    world.plain(world.inputs(lengths, world.batch(world.adapters(3, (8,), gpu_world.ALL), lengths)))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = launches(Path(folder))
    from manylora.kernels.cuda.launch import launch

    total = [0.0, 0.0]
    for kernel, grid, arguments, constants in found:
        triton = least(lambda: kernel[grid](*arguments, **constants))  # noqa: B023 - called at once
        ours = least(lambda: launch(kernel, grid, *arguments, **constants))  # noqa: B023
        total = [total[0] + triton, total[1] + ours]
        print(f"{kernel.__name__:16s} triton's {triton:6.1f}  ours {ours:6.1f}", flush=True)
    print(f"{len(found):2d} launches      triton's {total[0]:6.1f}  ours {total[1]:6.1f}")


if __name__ == "__main__":
    main()
