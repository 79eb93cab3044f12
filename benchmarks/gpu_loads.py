"""Loads: time to first token by the location of the adapter, and throughput while adapters are swapped.

Both use the real adapter cache: its pages, copies and order of eviction. They do not use the engine's
scheduler, because it needs more packages than torch.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gpu_clock import Clock
from gpu_report import Report
from gpu_world import ALL, World

from manylora.adapters.cache.cache import AdapterCache
from manylora.adapters.cache.pool import AdapterPool
from manylora.adapters.geometry import Layout, RowShape, plan_cache
from manylora.adapters.tensors import Adapter, AdapterRow
from manylora.config.engine import LoraCacheConfig
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import LoraBatch, LoraSegment

SECTION = "Time to first token, rank 16, 7 modules"
BATCH = 32


class _Cache:
    """A pool for `count` adapters of one rank on every module, on each of the two levels."""

    def __init__(self, world: World, rank: int, count: int) -> None:
        self.rank, modules, layers = rank, world.modules, world.config.num_layers
        self.places = [(m, layer) for layer in range(layers) for m in ALL]
        self.sizes = [modules[m].row_elements(RowFormat(rank)) for m, _ in self.places]
        one = sum(self.sizes) * world.dtype.itemsize
        room = int(1.2 * one * count) + 2**26
        limits = LoraCacheConfig(
            max_adapter_size=rank, optimal_adapter_size=rank, host_memory_bytes=room, gpu_memory_bytes=room
        )
        plan = plan_cache(modules.values(), layers, limits, world.dtype.itemsize, 0)
        self.layout = Layout.of(
            [RowShape(modules[m], layer, RowFormat(rank)) for m, layer in self.places], plan.geometry
        )
        need = count * self.layout.num_pages
        self.pool = AdapterPool(plan.geometry, need, need, world.dtype, world.device.torch)
        self.pool.flat.zero_()
        if world.device.torch.type == "cuda":
            torch.cuda.synchronize()  # the copies run on another stream, which does not wait for this

    def batch(self, segments: list[LoraSegment]) -> LoraBatch:
        return LoraBatch(self.pool.flat, tuple(segments), self.pool.geometry.page_width)


def first_tokens(world: World, clock: Clock, report: Report, prompt: int, step_seconds: float) -> None:
    """Measure one prompt whose adapter is on the device, on the host or in a file. step_seconds: duration of
    a decode step."""
    cache = _Cache(world, 16, 1)
    pool, layout, pages = cache.pool, cache.layout, list(range(cache.layout.num_pages))
    rows = pool.loaded(layout, pages).rows
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapter.npy"
        np.save(path, np.random.default_rng(0).normal(0, 0.02, sum(cache.sizes)).astype(np.float16))

        def read() -> None:
            values = np.load(path)
            parts = np.split(values, np.cumsum(cache.sizes)[:-1])
            named = zip(cache.places, parts, strict=True)
            made = tuple(AdapterRow(m, layer, RowFormat(cache.rank), part) for (m, layer), part in named)
            pool.write_host(Adapter("", made), layout, pages)

        def first(load: bool) -> None:
            if load:
                event = pool.load(layout, pages, pages)
                if event is not None:
                    pool.hold(event)
            batch = cache.batch([LoraSegment(0, prompt, rows)])
            world.plain(world.inputs([prompt], batch)).tolist()

        def from_file() -> None:
            read()
            first(load=True)

        read()
        taken = {
            "none": clock.time(lambda: world.plain(world.inputs([prompt], None)).tolist(), 5),
            "on the device": clock.time(lambda: first(load=False), 5),
            "on the host": clock.time(lambda: first(load=True), 5),
            "in a file (page cache)": clock.time(from_file, 3),
        }
    for where, seconds in taken.items():
        report.add(SECTION, model=world.name, prompt=prompt, adapter=where, milliseconds=1e3 * seconds)
    warm = taken["on the device"]
    report.hold("host", (taken["on the host"] - warm) / step_seconds)
    if world.name != "1B":
        report.hold("file", 1e3 * (taken["in a file (page cache)"] - warm))


@dataclass
class _Turn:
    """A sequence of the batch. left: tokens to generate. event: the copy of its adapter, or None."""

    digest: str = ""
    left: int = 0
    event: torch.Event | None = None


def zipf(world: World, report: Report, adapters: int, resident: int, steps: int, reply: int) -> None:
    """Measure decoding with adapters drawn by Zipf's law: with all adapters on the device, then with
    `resident` of them. reply: tokens per sequence."""
    cache = _Cache(world, 8, adapters)
    rates = {}
    for kept in (adapters, resident):
        _tokens_per_second(
            world, cache, kept, adapters, max(2, steps // 10), reply
        )  # compiles kernels and captures graphs
        rates[kept], loads = _tokens_per_second(world, cache, kept, adapters, steps, reply)
        report.add(
            "Throughput, rank 8, 7 modules, zipf", model=world.name, adapters=adapters, on_the_device=kept,
            steps=steps, loads=loads, tokens_per_s=rates[kept], share=rates[kept] / rates[adapters],
        )  # fmt: skip
    report.hold("zipf", rates[resident] / rates[adapters])


def _tokens_per_second(
    world: World, cache: _Cache, kept: int, adapters: int, steps: int, reply: int
) -> tuple[float, int]:
    pages, chance = cache.layout.num_pages, 1 / np.arange(1, adapters + 1)
    book, draws = AdapterCache(adapters * pages, kept * pages), np.random.default_rng(0)
    for number in range(adapters):
        book.host.put(str(number), pages, None)
    for number in range(kept):
        _bring(book, cache, str(number))
    turns = [_Turn() for _ in range(min(BATCH, world.limits.max_sequences))]
    tokens = loads = 0
    if world.device.torch.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        for turn in turns:
            if turn.left == 0:
                if turn.digest:
                    book.device.unpin(turn.digest)
                    book.host.unpin(turn.digest)
                first = not turn.digest
                turn.digest = str(draws.choice(adapters, p=chance / chance.sum()))
                turn.left = int(draws.integers(1, reply + 1)) if first else reply
                turn.event = None
                if not book.on_device(turn.digest):
                    turn.event = _bring(book, cache, turn.digest)
                    loads += 1
                book.device.pin(turn.digest)
                book.host.pin(turn.digest)
        ready = [turn for turn in turns if turn.event is None or turn.event.query()]
        if not ready:  # without other work, the device waits for the copies
            ready = turns
            for turn in turns:
                assert turn.event is not None
                cache.pool.hold(turn.event)
        ready.sort(key=lambda turn: turn.digest)
        _decode(world, cache, book, ready)
        tokens += len(ready)
    return tokens / (time.perf_counter() - began), loads


def _bring(book: AdapterCache, cache: _Cache, digest: str) -> torch.Event | None:
    entry = book.load(digest, None)
    entry.content = cache.pool.loaded(cache.layout, entry.pages).rows
    return cache.pool.load(cache.layout, book.host.entries[digest].pages, entry.pages)


def _decode(world: World, cache: _Cache, book: AdapterCache, ready: list[_Turn]) -> None:
    segments: dict[str, tuple[int, int]] = {}
    for row, turn in enumerate(ready):
        segments[turn.digest] = segments.get(turn.digest, (row, 0))[0], row + 1
        turn.left -= 1
    made = [LoraSegment(*span, book.device.entries[digest].content) for digest, span in segments.items()]
    world.decode(world.inputs([1] * len(ready), cache.batch(made))).tolist()
