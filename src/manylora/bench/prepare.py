"""Random datasets: prompts of random tokens, with lengths and adapters drawn from distributions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manylora.bench.datasets import BenchRequest
from manylora.bench.popularity import spread
from manylora.llmapi.lora import LoRARequest

__all__ = ["Lengths", "adapter_named", "normal_lengths", "random_requests", "uniform_lengths"]

Lengths = Callable[[random.Random], int]


@dataclass(frozen=True)
class _Normal:
    mean: float
    stdev: float

    def __call__(self, rng: random.Random) -> int:
        return max(1, round(rng.gauss(self.mean, self.stdev)))


@dataclass(frozen=True)
class _Uniform:
    low: int
    high: int

    def __call__(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def normal_lengths(mean: float, stdev: float) -> Lengths:
    """Tokens, at least 1."""
    return _Normal(mean, stdev)


def uniform_lengths(low: int, high: int) -> Lengths:
    """Tokens, both ends included."""
    return _Uniform(low, high)


def random_requests(
    count: int,
    input_len: Lengths,
    output_len: Lengths,
    vocab_size: int,
    rng: random.Random,
    adapters: Sequence[LoRARequest | None] = (None,),
    popularity: str = "uniform",
) -> list[BenchRequest]:
    chosen = spread(popularity, adapters, count, rng)
    return [
        BenchRequest(
            task_id=number,
            prompt=None,
            input_ids=tuple(rng.randrange(vocab_size) for _ in range(input_len(rng))),
            output_tokens=output_len(rng),
            lora=lora,
        )
        for number, lora in enumerate(chosen)
    ]


def adapter_named(lora_dir: Path, adapter_id: int) -> LoRARequest | None:
    """<lora_dir>/<id>, which must exist; -1 is the base model. Raises ValueError."""
    if adapter_id == -1:
        return None
    return LoRARequest(f"lora_{adapter_id}", adapter_id, str(lora_dir / str(adapter_id)))
