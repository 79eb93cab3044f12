#!/usr/bin/env python3
"""The engine in-process: output tokens per second with and without adapters, TTFT, memory, start-up.

The physics. A decode step of n sequences reads every weight once, W bytes, and does 2 n FLOPs a weight: it
takes max(bytes / bandwidth, FLOPs / rate), both measured here first. A distinct adapter of rank r adds
r * sum(in + out) elements to the bytes and 2 r * sum(in + out) FLOPs to each of its sequences; one sequence
for each adapter is the worst case for the bytes. The ideal ratio to the base is the ratio of these times;
what is measured below it is overhead: calls, copies, padding.

    engine.py --model small --rounds 3
    engine.py --model mid --cases base,r16all-8

Models: small is a Llama of 125 million parameters, mid a Qwen2 of 387 million, both random. Load: 32 requests
of 64 tokens in and 64 out, 16 at a time. Every round runs every case once, in turn; ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import queue
import resource
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from manylora.config import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.loop import EngineLoop
from manylora.lora.modules import LoraModule, lora_modules
from manylora.request import LoraInput, Request, SamplingParams

MODELS = {
    "small": ("llama", {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                        "num_key_value_heads": 4, "intermediate_size": 2048}),
    "mid": ("qwen2", {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
                      "num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True}),
}  # fmt: skip
COMMON = {"vocab_size": 32000, "max_position_embeddings": 1024, "initializer_range": 0.02}
QKV, ALL = (1, 2, 3), (1, 2, 3, 4, 5, 6, 7)
REQUESTS, AT_ONCE, PROMPT, OUTPUT = 32, 16, 64, 64
BASE = "base"


@dataclass(frozen=True)
class Case:
    """ranks in turn over so many distinct adapters; none for the base model."""

    name: str
    ranks: tuple[int, ...] = ()
    modules: tuple[int, ...] = ()
    adapters: int = 0


CASES = [
    Case(BASE),
    Case("resident", (16,), ALL, 0),  # base traffic while 32 adapters are in the cache
    *(Case(f"r8qkv-{n}", (8,), QKV, n) for n in (1, 8, 32)),
    *(Case(f"r16all-{n}", (16,), ALL, n) for n in (1, 8, 32)),
    Case("mixed-32", (4, 8, 16, 32, 64), ALL, 32),
]


def adapter(case: Case, number: int, modules: dict[int, LoraModule], layers: int) -> LoraInput:
    picks = np.random.default_rng(number)
    rank = case.ranks[number % len(case.ranks)]
    rows = [(m, layer) for layer in range(layers) for m in case.modules]
    width = max(rank * (modules[m].in_dim + modules[m].out_dim) for m in case.modules)
    weights = np.zeros((1, len(rows), width), np.float32)
    for i, (m, _) in enumerate(rows):
        size = rank * (modules[m].in_dim + modules[m].out_dim)
        weights[0, i, :size] = picks.normal(0, 0.01, size)
    config = np.array([[[m, layer, rank, 0] for m, layer in rows]], np.int32)
    return LoraInput(hash((case.name, number)) % 2**60, weights, config)


def prompts(count: int) -> list[tuple[int, ...]]:
    picks = np.random.default_rng(7)
    return [tuple(map(int, picks.integers(10, 31000, PROMPT))) for _ in range(count)]


def throughput(loop: EngineLoop, loras: list[LoraInput | None]) -> tuple[float, float]:
    """Output tokens per second and median TTFT in seconds: AT_ONCE requests are open at any time."""
    done: queue.SimpleQueue = queue.SimpleQueue()
    first: list[float] = []

    def sink(event) -> None:
        if event.last:
            m = event.metrics
            first.append((m.first_token_ns - m.arrival_ns) / 1e9)
            done.put(event)

    texts = prompts(REQUESTS)
    began, sent = time.perf_counter(), 0
    for finished in range(REQUESTS + 1):
        while sent < REQUESTS and sent - finished < AT_ONCE:
            loop.submit(
                Request(texts[sent], SamplingParams(max_tokens=OUTPUT), loras[sent % len(loras)]), sink
            )
            sent += 1
        if finished < REQUESTS:
            done.get()
    return REQUESTS * OUTPUT / (time.perf_counter() - began), statistics.median(first)


def warm(loop: EngineLoop, loras: list[LoraInput | None]) -> None:
    """Bring the tensors once; afterwards the ids are enough."""
    done: queue.SimpleQueue = queue.SimpleQueue()
    for lora in loras:
        loop.submit(Request((5, 6, 7), SamplingParams(max_tokens=1), lora), lambda e: done.put(e))
    for _ in loras:
        event = done.get()
        assert event.error is None, event.error


def store_as(path: Path, dtype: str) -> None:
    """Rewrite a float32 checkpoint; the engine then computes as it does by itself for such a model."""
    file = path / "model.safetensors"
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"dtype": dtype}), encoding="utf-8")


def roofline(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a large copy (read), FLOPs per second of a large GEMM."""
    big = torch.ones(256 * 2**20 // 4)
    began = time.perf_counter()
    for _ in range(5):
        big.sum()
    bandwidth = 5 * big.nbytes / (time.perf_counter() - began)
    a, b = torch.randn(1024, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)
    a @ b
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    return bandwidth, 10 * 2 * 1024**3 / (time.perf_counter() - began)


@dataclass(frozen=True)
class Ideal:
    """Times of this machine at its limits: bytes at the measured bandwidth, FLOPs at the measured rate."""

    weights: int  # of the layers
    head: int  # weights that only rows with logits meet
    weight_size: int  # bytes of one
    adapter_size: int
    bandwidth: float
    rate: float

    def step(self, extra_bytes: float = 0, extra_flops: float = 0) -> float:
        """Seconds of a decode step of AT_ONCE sequences."""
        weights = self.weights + self.head
        flops = 2 * weights * AT_ONCE + extra_flops
        return max((weights * self.weight_size + extra_bytes) / self.bandwidth, flops / self.rate)

    def throughput(self) -> float:
        """Output tokens per second of the whole base run, prompts included."""
        prompts = 2 * self.weights * PROMPT * REQUESTS / self.rate
        return REQUESTS * OUTPUT / (prompts + REQUESTS / AT_ONCE * OUTPUT * self.step())

    def ratio(self, case: Case, modules: dict[int, LoraModule], layers: int) -> float:
        """Of a decode step: time of the base by time with this case's adapters."""
        if not case.adapters:
            return 1.0
        per_rank = layers * sum(modules[m].in_dim + modules[m].out_dim for m in case.modules)
        distinct = min(case.adapters, AT_ONCE)
        ranks = [case.ranks[i % len(case.ranks)] for i in range(distinct)]
        extra_bytes = sum(ranks) * per_rank * self.adapter_size
        return self.step() / self.step(extra_bytes, 2 * sum(ranks) / distinct * per_rank * AT_ONCE)


def ideal_of(engine: Engine) -> Ideal:
    model, size = engine.model, getattr(torch, engine.model.dtype).itemsize
    embedding = model.vocab_size * model.hidden_size
    total = engine.stats().weight_bytes // size
    bandwidth, rate = roofline(engine._decoder.dtype)
    pool = engine.adapters._pool.flat
    return Ideal(total - 2 * embedding, embedding, size, pool.element_size(), bandwidth, rate)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small", choices=sorted(MODELS))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    options = parser.parse_args()
    wanted = options.cases.split(",")
    cases = [case for case in CASES if case.name in wanted or case.name == BASE]
    with tempfile.TemporaryDirectory() as folder:
        from manylora.testing import make_model

        kind, shape = MODELS[options.model]
        path = make_model(Path(folder) / "model", kind, **COMMON, **shape)
        store_as(path, options.dtype)
        began = time.perf_counter()
        lora = LoraCacheConfig(gpu_memory_bytes=2**31, host_memory_bytes=2**31)
        engine = Engine(EngineConfig(path, device="cpu", max_batch_size=AT_ONCE,
                                     enable_kv_cache_reuse=False, lora=lora))  # fmt: skip
        started = time.perf_counter() - began
        modules, ideal = lora_modules(engine.model), ideal_of(engine)
        print(f"read bandwidth {ideal.bandwidth / 1e9:.1f} GB/s, GEMM {ideal.rate / 1e9:.0f} GFLOP/s: "
              f"at most {ideal.throughput():.0f} tokens/s", flush=True)  # fmt: skip
        loop = EngineLoop(engine)
        throughput(loop, [None])
        results: dict[str, list[float]] = {case.name: [] for case in cases}
        ttft: dict[str, list[float]] = {case.name: [] for case in cases}
        ids: dict[str, list[LoraInput | None]] = {}
        for case in cases:
            count = case.adapters or (32 if case.ranks else 0)
            tensors = [adapter(case, n, modules, engine.model.num_layers) for n in range(count)]
            warm(loop, list(tensors))
            ids[case.name] = [LoraInput(one.task_id) for one in tensors] if case.adapters else [None]
        for number in range(options.rounds):
            for case in cases:
                rate, first = throughput(loop, ids[case.name])
                results[case.name].append(rate)
                ttft[case.name].append(first)
            print(f"round {number + 1} done", flush=True)
        base = statistics.median(results[BASE])
        print(f"\n{options.model}, {options.dtype}, started in {started:.1f} s, base at "
              f"{base / ideal.throughput():.2f} of the limit")  # fmt: skip
        print(f"{'case':12} {'tokens/s':>9} {'of base':>8} {'ideal':>6} {'TTFT ms':>8}")
        for case in cases:
            rate = statistics.median(results[case.name])
            best = ideal.ratio(case, modules, engine.model.num_layers)
            first = statistics.median(ttft[case.name]) * 1000
            print(f"{case.name:12} {rate:9.0f} {rate / base:8.2f} {best:6.2f} {first:8.0f}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"peak resident memory {peak:.2f} GiB")
        loop.close()
        print(json.dumps({"results": results, "ttft": ttft, "ideal": asdict(ideal), "start_s": started,
                          "peak_gib": peak, **vars(options)}))  # fmt: skip


if __name__ == "__main__":
    main()
