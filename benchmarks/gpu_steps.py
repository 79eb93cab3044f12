"""Steps: decoding and prefill with and without adapters, compared with the bytes that they must read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu_clock import Clock
from gpu_report import Report
from gpu_world import ALL, QKV, World

from manylora.kernels.spec import LoraTarget
from manylora.kernels.transfer import to_device

PREFILL_REPEATS = 3


@dataclass(frozen=True)
class Steps:
    """Measures the steps of one model. bandwidth: bytes per second of a large copy."""

    world: World
    clock: Clock
    report: Report
    bandwidth: float

    def base(self, batch: int) -> None:
        """Measure decode steps of the base model in three ways: from a captured graph and overlapped, like
        the engine (`step`); from a graph, waiting for each (`waited_for`); and eagerly, waiting for each
        (`plain`)."""
        world, inputs = self.world, self.world.inputs([1] * batch, None)
        seconds = self.clock.time_steps(lambda: world.decode(inputs))
        graph = self.clock.time(lambda: world.decode(inputs))
        plain = self.clock.time(lambda: world.plain(inputs))
        ideal = world.step_bytes(batch) / self.bandwidth
        self.report.add(
            "Decode step", model=world.name, batch=batch, context=world.context, step=1e3 * seconds,
            waited_for=1e3 * graph, plain=1e3 * plain, ideal=1e3 * ideal, of_ideal=ideal / seconds,
        )  # fmt: skip
        if world.name == "8B" and batch == 32:
            self.report.hold("decode", ideal / seconds)

    def ratio(self, ranks: tuple[int, ...], modules: tuple[int, ...], count: int, batch: int) -> None:
        """Measure R_base: the base model's step time divided by that with `count` distinct adapters. The
        ideal is the ratio of the bytes."""
        world = self.world
        base = self.clock.time_steps(self._decode(batch))
        adapters = world.adapters(count, ranks, modules)
        inputs = world.inputs([1] * batch, world.batch(adapters, [1] * batch))
        seconds = self.clock.time_steps(lambda: world.decode(inputs))
        size = world.step_bytes(batch)
        ratio, ideal = base / seconds, size / (size + adapters.num_bytes)
        self.report.add(
            "R_base", model=world.name, ranks=ranks_text(ranks), modules=len(modules), batch=batch,
            adapters=count, base=1e3 * base, step=1e3 * seconds, R_base=ratio, R_ideal=ideal,
            of_ideal=ratio / ideal,
        )  # fmt: skip
        self.report.hold("ratio", ratio / ideal)

    def tax(self, batch: int) -> None:
        """Measure steps of the base model before any adapter was used, and after batches with adapters."""
        world = self.world
        before = self.clock.time_steps(self._decode(batch))
        adapters = world.adapters(min(8, batch), (16,), ALL)
        inputs = world.inputs([1] * batch, world.batch(adapters, [1] * batch))
        self.clock.time_steps(lambda: world.decode(inputs))
        after = self.clock.time_steps(self._decode(batch))
        self.report.add(
            "Base-only tax", model=world.name, batch=batch, before=1e3 * before, after_adapters=1e3 * after,
            ratio=before / after,
        )  # fmt: skip
        self.report.hold("tax", before / after)

    def prefill(self, prompt: int, sequences: int) -> None:
        world, lengths = self.world, [prompt] * sequences
        bare = world.inputs(lengths, None)
        base = self.clock.time(lambda: world.plain(bare), PREFILL_REPEATS)
        for count in dict.fromkeys((1, sequences)):
            inputs = world.inputs(lengths, world.batch(world.adapters(count, (16,), ALL), lengths))
            seconds = self.clock.time(lambda i=inputs: world.plain(i), PREFILL_REPEATS)  # type: ignore[misc]
            self.report.add(
                "Prefill, rank 16, 7 modules", model=world.name, prompts=sequences, tokens=sum(lengths),
                adapters=count, base=1e3 * base, with_adapters=1e3 * seconds, ratio=base / seconds,
            )  # fmt: skip
            self.report.hold("prefill", base / seconds)

    def kernels(self, rank: int, batch: int, count: int) -> None:
        """Measure the shrink and expand kernels of q, k, v over all layers, so that caches do not help."""
        world, config = self.world, self.world.config
        device, q, kv = world.device, config.q_size, config.kv_size
        targets = tuple(LoraTarget(m, s, w) for m, s, w in ((1, 0, q), (2, q, kv), (3, q + kv, kv)))
        adapters = world.adapters(count, (rank,), QKV)
        inputs = world.inputs([1] * batch, world.batch(adapters, [1] * batch))
        lora = to_device(inputs.plan(device.ops), device.torch).lora
        assert lora is not None
        x = torch.randn(batch, config.hidden_size, device=device.torch).to(world.dtype)
        y = torch.zeros(batch, q + 2 * kv, dtype=world.dtype, device=device.torch)

        def one(layer: int) -> torch.Tensor:
            device.ops.lora_add(y, x, lora, layer, targets)
            return y

        calls = [lambda layer=layer: one(layer) for layer in range(config.num_layers)]
        seconds = self.clock.time_kernels(calls)
        ideal = (adapters.num_bytes / config.num_layers + 2 * y.nbytes + x.nbytes) / self.bandwidth
        self.report.add(
            "Adapter kernels of q, k, v", model=world.name, rank=rank, batch=batch, adapters=count,
            microseconds=1e6 * seconds, ideal=1e6 * ideal, of_ideal=ideal / seconds,
        )  # fmt: skip

    def _decode(self, batch: int) -> Callable[[], torch.Tensor]:
        inputs = self.world.inputs([1] * batch, None)
        return lambda: self.world.decode(inputs)


def ranks_text(ranks: tuple[int, ...]) -> str:
    return "r" + "/".join(map(str, ranks))
