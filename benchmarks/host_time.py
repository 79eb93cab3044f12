"""Measures the host time of a decode step: the CPU work between two launches of a captured step.

    PYTHONPATH=src python benchmarks/host_time.py [--parts] [BATCH/ADAPTERS[/SAMPLING] ...]

Runs everything in a step of the engine except the model. A stub returns the logits, tables are built and
packed as for a GPU, and graph capture is faked. No GPU is needed. SAMPLING is greedy (default), drawn or
penalty. The reported time is the minimum CPU time of the thread over many steps, so that other work on the
machine has little effect. It excludes torch's calls into the driver, which take a few microseconds each.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import manylora.engine.build as build
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.engine.input_maker import InputMaker
from manylora.engine.inputs import StepInputs
from manylora.engine.sampler import Sampler
from manylora.kernels import transfer
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import Device
from manylora.lora.convert import convert_peft
from manylora.model.decoder import Decoder
from manylora.request import LoraInput, Request, SamplingConfig
from manylora.testing.tiny_models import make_adapter, make_model

CASES = ("32/0", "32/32", "128/32", "128/128", "128/128/drawn", "128/128/penalty")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"top_p": 0.9, "temperature": 0.8, "seed": 1},
    "penalty": {"repetition_penalty": 1.1},
}
LAYERS = 32
CONTEXT = 1024  # tokens of each prompt
VOCAB = 256  # of the stub's logits; small, because a GPU would do the arithmetic of sampling
STEPS = 100
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def fake_capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    output = function()
    return lambda: output


class World:
    """A tiny model of many layers and its adapters, created in `folder` on first use."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        if not self.model.exists():
            make_model(self.model, "llama", seed=1, num_hidden_layers=LAYERS, max_position_embeddings=16384)
        path = folder / "adapter"
        if not path.exists():
            make_adapter(path, self.model, seed=1, rank=8, modules=MODULES)
        self._weights, self._config = convert_peft(path, "float32")

    def adapter(self, number: int) -> LoraInput:
        weights = self._weights.copy()
        weights.flat[0] = number / 256  # different content makes a different adapter
        return LoraInput(number + 1, weights, self._config)

    def engine(self, batch: int) -> Engine:
        device = Device(torch.device("cpu"), CudaOps(), "host only", fake_capture, overlaps=True)
        build.open_device = lambda name: device
        config = EngineConfig(
            self.model,
            device="cpu",
            lora=LoraCacheConfig(gpu_memory_bytes=2**29, host_memory_bytes=2**29),
            enable_overlap=True,
            max_batch_size=batch,
            max_seq_len=CONTEXT + 512,
            max_num_tokens=8192,
            tokens_per_block=32,
            max_tokens_in_paged_kv_cache=batch * (CONTEXT + 600),
        )
        engine = Engine(config)
        # These tensors would already be on the GPU. Everything else is packed and copied, as for a GPU.
        there = {engine.adapters.parts.pool.flat.data_ptr(), device.ops._places.data_ptr()}
        transfer._is_away = lambda value, device: value.numel() > 0 and value.data_ptr() not in there
        return engine


def start(world: World, batch: int, adapters: int, sampling: str) -> Engine:
    """Start an engine and run it until all sequences have decoded for some steps."""
    engine = world.engine(batch)
    loras = [world.adapter(i) for i in range(adapters)]
    for i in range(batch):
        prompt = tuple((7 * j + i) % 250 for j in range(CONTEXT))
        params = SamplingConfig(max_tokens=400, **SAMPLING[sampling])
        lora = loras[i % adapters] if adapters else None
        engine.submit(engine.prepare(Request(prompt, params, lora, streaming=True)))
    steps = 0
    while steps < 12:
        engine.step()
        stats = engine.stats()
        steps = 0 if stats.waiting or stats.context_requests else steps + 1
    return engine


def measure(engine: Engine) -> tuple[float, float]:
    """Minimum and median milliseconds of a step."""
    times = []
    for _ in range(STEPS):
        began = time.thread_time()
        engine.step()
        times.append(1e3 * (time.thread_time() - began))
    return min(times), sorted(times)[STEPS // 2]


class Parts:
    """Measures the minimum time of some functions in a step. The wrappers themselves cost a little."""

    def __init__(self, engine: Engine) -> None:
        self._least: dict[str, float] = defaultdict(lambda: float("inf"))
        self._wrap(engine._scheduler, "schedule")
        self._wrap(engine, "_assume_done")
        self._wrap(engine, "_process")
        self._wrap(engine._runner, "launch")
        self._wrap(InputMaker, "__call__")
        self._wrap(InputMaker, "add_adapters")
        self._wrap(engine._runner._graphs, "run")
        self._wrap(engine._runner._ops, "plan")
        self._wrap(StepInputs, "plan")
        self._wrap(Sampler, "__call__")

    def _wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)
        label = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            result = inner(*arguments, **options)
            self._least[label] = min(self._least[label], time.thread_time() - began)
            return result

        setattr(owner, name, timed)

    def show(self) -> None:
        for label, seconds in self._least.items():
            print(f"    {label:34s} {1e3 * seconds:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--parts", action="store_true", help="show which functions take the time")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "manylora-host-time")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    world = World(options.folder)
    logits = torch.randn(1024, VOCAB)
    Decoder.forward = lambda self, batch, kv, states=None: logits[: len(batch.logits_rows)]  # type: ignore[method-assign]
    for case in options.cases:
        batch, adapters, *rest = case.split("/")
        sampling = rest[0] if rest else "greedy"
        engine = start(world, int(batch), int(adapters), sampling)
        parts = Parts(engine) if options.parts else None
        least, median = measure(engine)
        name = f"batch {batch}, adapters {adapters}, {sampling}"
        print(f"{name:40s} {least:6.2f} ms, median {median:6.2f}", flush=True)
        if parts is not None:
            parts.show()
        engine.close()


if __name__ == "__main__":
    main()
