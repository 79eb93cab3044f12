"""Random datasets: prompts of random tokens; lengths and adapters follow distributions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from manylora.bench.datasets import BenchRequest
from manylora.bench.popularity import spread
from manylora.llmapi.lora import LoRARequest

Lengths = Callable[[random.Random], int]
"""Draws a number of tokens."""


def normal_lengths(mean: float, stdev: float) -> Lengths:
    """In tokens, at least 1."""
    return lambda rng: max(1, round(rng.gauss(mean, stdev)))


def uniform_lengths(low: int, high: int) -> Lengths:
    """In tokens, both ends included."""
    return lambda rng: rng.randint(low, high)


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
    """The adapter in <lora_dir>/<id>; None, the base model, for -1. Raises ValueError if it does not
    exist."""
    if adapter_id == -1:
        return None
    return LoRARequest(f"lora_{adapter_id}", adapter_id, str(lora_dir / str(adapter_id)))
