#!/usr/bin/env python3
"""The GPU path in one command: steps, adapters, loads and kernels, each against the memory traffic it needs.

The physics. A decode step of few sequences is bound by memory: it reads the weights, the keys and values of
its sequences, and each distinct adapter of the batch once. Divided by the bandwidth that a large copy reaches
on the same machine this is the least time a step can take (`ideal`); what is measured above it is launches,
dependencies and padding. R_base is the base model's step time over the time with N adapters, and `of ideal`
compares it with the ratio of the bytes.

    PYTHONPATH=src python benchmarks/gpu.py                      # every section, at most 8 minutes
    PYTHONPATH=src python benchmarks/gpu.py --device cpu --tiny  # the same code on a CPU, interpreted

Needs torch with triton, numpy, and nothing else; no network. Sections for which time or memory is lacking
are skipped with the reason. Writes gpu.json and gpu.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIXED = (8, 16, 32, 64)
Row = dict[str, Any]


@dataclass
class Report:
    """Sections of rows, in the order they were measured."""

    facts: Row
    sections: dict[str, list[Row]] = field(default_factory=dict)

    def add(self, section: str, **values: Any) -> None:
        self.sections.setdefault(section, []).append(values)
        print(section, " ".join(f"{k}={_text(v)}" for k, v in values.items()), flush=True)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"facts": self.facts, "sections": self.sections}
        (folder / "gpu.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        lines = ["# GPU benchmark", "", *(f"- {k}: {_text(v)}" for k, v in self.facts.items())]
        for name, rows in self.sections.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            lines += ["", f"## {name}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
            lines += ["| " + " | ".join(_text(row.get(c, "")) for c in columns) + " |" for row in rows]
        (folder / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Plan:
    """What is measured: everything, or little of it with tiny shapes."""

    tiny: bool
    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    context: int
    counts: tuple[int, ...]
    prompt: int

    @classmethod
    def of(cls, tiny: bool) -> Plan:
        if tiny:
            return cls(True, ("tiny",), (1, 2), 24, (1, 2), 16)
        return cls(False, ("1B", "8B"), (1, 32, 128), 1024, (1, 8, 32, 128), 1024)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; what a CPU can do")
    parser.add_argument("--minutes", type=float, default=7.5, help="no section begins after that")
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
    return Bench(options).run()


class Bench:
    """One run on one device."""

    def __init__(self, options: argparse.Namespace) -> None:
        import logging

        import torch
        from gpu_world import Clock

        from manylora.device import Device, open_device

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        self.torch, self.options, self.plan = torch, options, Plan.of(options.tiny)
        if options.device == "cuda":
            self.device = open_device("cuda")
            if self.device.capture is None:
                raise SystemExit("the kernels need triton, which comes with CUDA builds of torch")
            self.dtype = torch.bfloat16
        else:
            from manylora.kernels.cuda.ops import CudaOps

            self.device = Device(torch.device("cpu"), CudaOps(), "CPU, interpreted", _run_again)
            self.dtype = torch.float32
        deadline = time.perf_counter() + 60 * options.minutes
        self.clock = Clock(self.device, 1 if self.plan.tiny else 20, deadline)
        self.report = Report(
            {
                "device": self.device.name,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "dtype": str(self.dtype),
                "figures": "of a CPU under the interpreter: they say nothing"
                if options.device == "cpu"
                else "medians; times in ms",
            }
        )

    def run(self) -> int:
        began = time.perf_counter()
        try:
            self._check()
            self.bandwidth = self._bandwidth()
            for shape in self.plan.shapes:
                self._try(f"model {shape}", lambda shape=shape: self._model(shape))
                self._free()
            self._try("transformers", self._transformers)
        finally:
            self.report.facts["seconds"] = round(time.perf_counter() - began, 1)
            self.report.write(self.options.out)
        print(f"written to {self.options.out}/gpu.json and gpu.md")
        return 0

    def _try(self, what: str, section: Callable[[], None]) -> None:
        """Leave out what does not fit into time or memory, and say so."""
        if self.clock.left < 0:
            self.report.add("Skipped", what=what, reason="out of time")
            return
        try:
            section()
        except self.torch.OutOfMemoryError:
            self.report.add("Skipped", what=what, reason="out of memory")
            self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device.torch.type == "cuda":
            self.torch.cuda.empty_cache()

    def _check(self) -> None:
        """Figures of wrong kernels are worth nothing: a tiny model must say what the reference says."""
        from gpu_world import ALL, World

        from manylora.device import Device
        from manylora.kernels.reference import ReferenceOps

        torch = self.torch
        torch.manual_seed(0)
        world = World("tiny", self.device, torch.float32, 3, 24)
        adapters = world.adapters(2, (8, 24), ALL)
        twin, worst = Device(self.device.torch, ReferenceOps(), "reference"), 0.0
        for lengths in ([1, 1, 1], [5, 1, 20]):
            for lora in (None, world.batch(adapters, lengths)):
                inputs = world.inputs(lengths, lora)
                batch = _moved(inputs, self.device.ops.plan, self.device.torch)
                got = world.decoder.forward(batch, world.kv)
                worst = max(worst, float((got - _reference(world, inputs, twin)).abs().max()))
                if not worst < 1e-3:
                    raise SystemExit(f"the kernels are wrong: logits differ by {worst:.3g}")
        self.report.add("Check", logits_differ_at_most=worst)

    def _bandwidth(self) -> float:
        """Bytes per second of a large copy, read and written."""
        size = 2**20 if self.plan.tiny else 2**31
        source = self.torch.empty(size, dtype=self.torch.uint8, device=self.device.torch)
        target = self.torch.empty_like(source)
        seconds = self.clock.time(lambda: target.copy_(source))
        self.report.add("Bandwidth", gigabytes_per_s=2 * size / seconds / 1e9)
        return 2 * size / seconds

    def _model(self, shape: str) -> None:
        from gpu_world import ALL, QKV, World

        plan = self.plan
        world = World(shape, self.device, self.dtype, max(plan.batches), plan.context)
        base = {batch: self._step(world, batch) for batch in plan.batches}
        wide = plan.batches[-1] if plan.tiny else 32
        for ranks in ((16,), MIXED) if plan.tiny else ((16,), (8,), (64,), MIXED):
            for modules in (ALL, QKV):
                for count in plan.counts:
                    name = f"{shape} {_ranks(ranks)} {len(modules)} modules, {count} adapters"
                    batch = max(wide, count)
                    self._try(
                        name,
                        lambda r=ranks, m=modules, n=count, b=batch: self._ratio(world, r, m, n, b, base),
                    )
                    self._free()
        again = self.clock.time(lambda: world.decode(world.inputs([1] * wide, None)))
        self.report.add(
            "Base-only tax", model=shape, batch=wide, before=1e3 * base[wide], after_adapters=1e3 * again,
            ratio=base[wide] / again,
        )  # fmt: skip
        self._try(f"{shape} prefill", lambda: self._prefill(world))
        self._try(f"{shape} TTFT", lambda: self._ttft(world))
        self._try(f"{shape} kernels", lambda: self._kernels(world))

    def _step(self, world: Any, batch: int) -> float:
        """Base decode steps, recorded and plain, against their bytes."""
        inputs = world.inputs([1] * batch, None)
        seconds = self.clock.time(lambda: world.decode(inputs))
        plain = self.clock.time(lambda: world.plain(inputs))
        ideal = self._bytes(world, batch) / self.bandwidth
        self.report.add(
            "Decode step", model=world.name, batch=batch, context=world.context, graph=1e3 * seconds,
            plain=1e3 * plain, ideal=1e3 * ideal, of_ideal=ideal / seconds,
        )  # fmt: skip
        return seconds

    def _ratio(
        self, world: Any, ranks: tuple[int, ...], modules: tuple[int, ...], count: int, batch: int, base: dict
    ) -> None:
        if batch not in base:
            base[batch] = self.clock.time(lambda: world.decode(world.inputs([1] * batch, None)))
        adapters = world.adapters(count, ranks, modules)
        inputs = world.inputs([1] * batch, world.batch(adapters, [1] * batch))
        seconds = self.clock.time(lambda: world.decode(inputs))
        ratio = base[batch] / seconds
        size = self._bytes(world, batch)
        ideal = size / (size + adapters.num_bytes)
        self.report.add(
            "R_base", model=world.name, ranks=_ranks(ranks), modules=len(modules), batch=batch,
            adapters=count, step=1e3 * seconds, R_base=ratio, R_ideal=ideal, of_ideal=ratio / ideal,
        )  # fmt: skip

    def _prefill(self, world: Any) -> None:
        from gpu_world import ALL

        most = self.plan.batches[-1] if self.plan.tiny else 4
        for sequences in (1, most):
            lengths = [min(self.plan.prompt, world.context)] * sequences
            bare = self.clock.time(lambda n=lengths: world.plain(world.inputs(n, None)), 3)
            for count in dict.fromkeys((1, sequences)):
                adapters = world.adapters(count, (16,), ALL)
                inputs = world.inputs(lengths, world.batch(adapters, lengths))
                seconds = self.clock.time(lambda i=inputs: world.plain(i), 3)
                self.report.add(
                    "Prefill, rank 16, 7 modules", model=world.name, prompts=sequences, tokens=sum(lengths),
                    adapters=count, base=1e3 * bare, with_adapters=1e3 * seconds, ratio=bare / seconds,
                )  # fmt: skip

    def _ttft(self, world: Any) -> None:
        """Time to the first token of one prompt: its adapter on the device, on the host, in a file."""
        for kind, seconds in ttft(world, self.clock, min(self.plan.prompt, world.context)).items():
            self.report.add("Time to first token, rank 16, 7 modules", model=world.name, adapter=kind,
                            time=1e3 * seconds)  # fmt: skip

    def _kernels(self, world: Any) -> None:
        """Shrink and expand of q, k, v over all layers, so that caches do not help."""
        from gpu_world import QKV

        from manylora.kernels.spec import LoraTarget

        torch, config = self.torch, world.config
        q, kv = config.q_size, config.kv_size
        targets = tuple(LoraTarget(m, s, w) for m, s, w in ((1, 0, q), (2, q, kv), (3, q + kv, kv)))
        for rank in (16, 64):
            for batch in self.plan.batches:
                for count in dict.fromkeys((1, batch)):
                    adapters = world.adapters(count, (rank,), QKV)
                    lora = world.batch(adapters, [1] * batch)
                    table = _moved(world.inputs([1] * batch, lora), self.device.ops.plan, self.device.torch)
                    x = torch.randn(batch, config.hidden_size, device=self.device.torch).to(self.dtype)
                    y = torch.zeros(batch, q + 2 * kv, dtype=self.dtype, device=self.device.torch)

                    def one(layer: int, y: Any = y, x: Any = x, lora: Any = table.lora) -> Any:
                        self.device.ops.lora_add(y, x, lora, layer, targets)
                        return y

                    calls = [lambda layer=layer: one(layer) for layer in range(config.num_layers)]
                    seconds = self.clock.time_kernels(calls)
                    moved = adapters.num_bytes / config.num_layers + 2 * y.nbytes + x.nbytes
                    ideal = moved / self.bandwidth
                    self.report.add(
                        "Adapter kernels of q, k, v", model=world.name, rank=rank, batch=batch,
                        adapters=count,
                        microseconds=1e6 * seconds, ideal=1e6 * ideal, of_ideal=ideal / seconds,
                    )  # fmt: skip

    def _transformers(self) -> None:
        from gpu_peft import measure

        try:
            for row in measure(self.plan.tiny, self.device.torch, self.dtype, self.clock):
                self.report.add("transformers + PEFT", **row)
        except (ValueError, TypeError, RuntimeError) as error:  # of a version whose interface is another
            self.report.add("Skipped", what="transformers + PEFT", reason=f"{type(error).__name__}: {error}")

    def _bytes(self, world: Any, batch: int) -> int:
        """Read by a base decode step. Of a tied embedding the head's reading counts."""
        config, weights = world.config, world.decoder.weight_bytes
        if not config.tie_word_embeddings:  # of the input embedding only single rows
            weights -= config.vocab_size * config.hidden_size * self.dtype.itemsize
        return weights + batch * world.context * world.kv_bytes_per_token


def ttft(world: Any, clock: Any, prompt: int) -> dict[str, float]:
    import numpy as np
    from gpu_world import ALL

    from manylora.config import LoraCacheConfig
    from manylora.kernels.spec import LoraBatch, LoraSegment
    from manylora.lora.geometry import Layout, plan_cache
    from manylora.lora.pool import AdapterPool
    from manylora.lora.tensors import Adapter, AdapterRow

    rank, layers, modules = 16, world.config.num_layers, world.modules
    limits = LoraCacheConfig(max_adapter_size=rank, host_memory_bytes=2**30, gpu_memory_bytes=2**30)
    plan = plan_cache(modules.values(), layers, limits, world.dtype.itemsize, 0)
    pool = AdapterPool(plan.geometry, plan.host_pages, plan.device_pages, world.dtype, world.device.torch)
    places = [(m, layer) for layer in range(layers) for m in ALL]
    layout = Layout.of([(modules[m], layer, rank, False) for m, layer in places], plan.geometry)
    pages = list(range(layout.num_pages))
    sizes = [rank * (modules[m].in_dim + modules[m].out_dim) for m, _ in places]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapter.npy"
        np.save(path, np.random.default_rng(0).normal(0, 0.02, sum(sizes)).astype(np.float16))

        def read() -> None:
            values, at, rows = np.load(path), 0, []
            for (m, layer), size in zip(places, sizes, strict=True):
                rows.append(AdapterRow(m, layer, rank, False, values[at : at + size]))
                at += size
            pool.write_host(Adapter("", tuple(rows)), layout, pages)

        def first(load: bool) -> None:
            if load:
                event = pool.load(layout, pages, pages)
                if event is not None:
                    pool.hold(event)
            segment = LoraSegment(0, prompt, pool.rows(layout, pages))
            batch = LoraBatch(pool.flat, (segment,), pool.alignment)
            world.plain(world.inputs([prompt], batch)).tolist()

        def from_file() -> None:
            read()
            first(load=True)

        read()
        return {
            "none": clock.time(lambda: world.plain(world.inputs([prompt], None)).tolist(), 5),
            "device": clock.time(lambda: first(load=False), 5),
            "host": clock.time(lambda: first(load=True), 5),
            "file (in the page cache)": clock.time(from_file, 3),
        }


def _moved(inputs: Any, plan: Any, device: Any) -> Any:
    from types import SimpleNamespace

    from manylora.kernels.moving import to_device

    return to_device(inputs.plan(SimpleNamespace(plan=plan)), device)


def _reference(world: Any, inputs: Any, twin: Any) -> Any:
    """Logits by the reference on the same weights, caches and pool."""
    from manylora.model.decoder import Decoder

    fresh = Decoder(world.config, world.weights, twin.ops)
    return fresh.forward(_moved(inputs, twin.ops.plan, twin.torch), world.kv)


def _run_again(function: Callable[[], Any]) -> Callable[[], Any]:
    function()
    return function


def _ranks(ranks: tuple[int, ...]) -> str:
    return "r" + "/".join(map(str, ranks))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
