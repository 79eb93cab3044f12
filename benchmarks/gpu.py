#!/usr/bin/env python3
"""Benchmarks the GPU path: steps, adapters, loads and kernels, each compared with the memory traffic it
needs.

The limit. A decode step of few sequences is memory-bound: it reads the weights, the keys and values of its
sequences, and each distinct adapter of the batch once. `ideal` is the time of these bytes at the bandwidth
that a large copy reaches on the same machine. Everything beyond it is launches, dependencies and padding.
R_base is the step time of the base model divided by that with N adapters. `of_ideal` divides it by the ratio
of the bytes.

    PYTHONPATH=src python benchmarks/gpu.py                      # every section, at most 8 minutes
    PYTHONPATH=src python benchmarks/gpu.py --device cpu --tiny  # the same code on a CPU, interpreted

Needs only torch with triton and numpy, and no network. The figures that have targets are measured first. If
time or memory runs out, the remaining sections are skipped and the reason is reported. Writes gpu.json and
gpu.md.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_steps import Steps
    from gpu_world import World


@dataclass(frozen=True)
class Plan:
    """What is measured. adapters, resident, steps and reply (tokens per sequence) are for the throughput."""

    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    wide: int  # the batch size of most figures
    context: int
    prompts: tuple[int, ...]
    counts: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    adapters: int
    resident: int
    steps: int
    reply: int


MIXED = (8, 16, 32, 64)
FULL = Plan(
    shapes=("8B", "1B"),
    batches=(32, 1, 128),
    wide=32,
    context=1024,
    prompts=(1, 4),
    counts=(1, 8, 32, 128),
    ranks=((16,), MIXED, (8,), (64,)),
    adapters=1000,
    resident=128,
    steps=600,
    reply=64,
)
TINY = Plan(("tiny",), (2,), 2, 16, (2,), (2,), (MIXED,), adapters=6, resident=2, steps=3, reply=1)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="use tiny shapes, for a CPU")
    parser.add_argument("--minutes", type=float, default=7.0, help="do not start a section after that")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu"))
    options = parser.parse_args()
    if options.device == "cpu":
        if not options.tiny:
            parser.error("--device cpu needs --tiny: the kernels are interpreted there")
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU is available; --device cpu --tiny checks the script itself", file=sys.stderr)
        return 1
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return Bench(options).run()


class Bench:
    """One run on one device."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from gpu_clock import Clock
        from gpu_report import Report

        from manylora.kernels.device import Device, open_device

        self.began, self.failed = time.perf_counter(), False
        self.torch, self.out, self.plan = torch, options.out, TINY if options.tiny else FULL
        if options.device == "cuda":
            self.device = open_device("cuda")
            if self.device.capture is None:
                raise SystemExit("the kernels need triton, which comes with CUDA builds of torch")
            self.dtype = torch.bfloat16
        else:
            from manylora.kernels.cuda.ops import CudaOps

            self.device = Device(torch.device("cpu"), CudaOps(), "CPU, interpreted", _run_again)
            self.dtype = torch.float32
        deadline = self.began + 60 * options.minutes
        self.clock = Clock(self.device, 0 if options.tiny else 20, deadline)
        figures = "medians; times in ms" if options.device == "cuda" else "from a CPU: meaningless"
        self.report = Report(
            {
                "device": self.device.name,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "dtype": str(self.dtype),
                "figures": figures,
            }
        )

    def run(self) -> int:
        from gpu_check import check

        try:
            check(self.device, self.dtype, self.report)
            self.bandwidth = self._bandwidth()
            for shape in self.plan.shapes:
                self._try(f"model {shape}", lambda shape=shape: self._model(shape))
                self._free()
        finally:
            self.report.facts["seconds"] = round(time.perf_counter() - self.began, 1)
            self.report.write(self.out)
        print(f"written to {self.out}/gpu.json and gpu.md")
        return int(self.failed)

    def _model(self, shape: str) -> None:
        from gpu_loads import first_tokens, zipf
        from gpu_steps import Steps
        from gpu_world import World

        plan = self.plan
        world = World(shape, self.device, self.dtype, max(plan.batches), plan.context)
        steps, prompt = Steps(world, self.clock, self.report, self.bandwidth), plan.context
        self._try(f"{shape} tax", lambda: steps.tax(plan.wide))
        for batch in plan.batches:
            self._try(f"{shape} decode step, batch {batch}", lambda b=batch: steps.base(b))
        self._ratios(steps, plan.ranks[:1])
        for prompts in plan.prompts:
            self._try(f"{shape} prefill, {prompts} prompts", lambda n=prompts: steps.prefill(prompt, n))
        one = world.inputs([1] * plan.wide, None)
        step = self.clock.time(lambda: world.decode(one))
        self._try(f"{shape} first token", lambda: first_tokens(world, self.clock, self.report, prompt, step))
        self._ratios(steps, plan.ranks[1:])
        for batch in plan.batches:
            for count in dict.fromkeys((1, batch)):
                self._try(
                    f"{shape} kernels, batch {batch}, {count} adapters",
                    lambda b=batch, n=count: steps.kernels(16, b, n),
                )
        if shape == plan.shapes[-1]:
            self._throughput(world, zipf)

    def _ratios(self, steps: Steps, mixes: tuple[tuple[int, ...], ...]) -> None:
        from gpu_steps import ranks_text
        from gpu_world import ALL, QKV

        for ranks in mixes:
            for modules in (ALL, QKV):
                for count in self.plan.counts:
                    name = f"{steps.world.name} {ranks_text(ranks)} {len(modules)} modules, {count} adapters"
                    batch = max(self.plan.wide, count)
                    self._try(name, lambda r=ranks, m=modules, n=count, b=batch: steps.ratio(r, m, n, b))

    def _throughput(self, world: World, zipf: Callable[..., None]) -> None:
        """Free the pool of the other sections first, because this section needs room for all adapters."""
        plan = self.plan
        world.let_go()
        self._free()
        self._try(
            f"{world.name} throughput",
            lambda: zipf(world, self.report, plan.adapters, plan.resident, plan.steps, plan.reply),
        )

    def _bandwidth(self) -> float:
        """Bytes per second of a large copy, counting reads and writes."""
        size = 2**20 if self.plan is TINY else 2**31
        source = self.torch.empty(size, dtype=self.torch.uint8, device=self.device.torch)
        target = self.torch.empty_like(source)
        seconds = self.clock.time(lambda: target.copy_(source))
        self.report.add("Bandwidth", gigabytes_per_s=2 * size / seconds / 1e9)
        return 2 * size / seconds

    def _try(self, what: str, section: Callable[[], Any]) -> None:
        """Run a section. If there is not enough time or memory, or it fails, report that and continue."""
        if self.clock.left < 0:
            self.report.add("Skipped", what=what, reason="out of time")
            return
        try:
            section()
        except self.torch.OutOfMemoryError:
            self.report.add("Skipped", what=what, reason="out of memory")
        except Exception as error:
            logging.exception("%s", what)
            first = str(error).splitlines()[0] if str(error) else ""
            self.report.add("Skipped", what=what, reason=f"{type(error).__name__}: {first}")
            self.failed = True
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device.torch.type == "cuda":
            self.torch.cuda.empty_cache()


def _run_again(function: Callable[[], Any]) -> Callable[[], Any]:
    function()
    return function


if __name__ == "__main__":
    sys.exit(main())
