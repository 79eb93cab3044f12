"""Which of N adapters each request asks for, as a named distribution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
POPULARITIES = ("distinct", "uniform", "zipf", "identical")
ZIPF = 1.5


def spread(popularity: str, adapters: Sequence[T], count: int, rng: random.Random) -> list[T]:
    """An adapter for each of `count` requests.

    distinct:  round robin, so that neighbouring requests differ. identical: the first adapter for all.
    uniform:   all are equally likely. zipf: the k-th has the weight k ** -1.5.
    """
    if popularity == "distinct":
        return [adapters[i % len(adapters)] for i in range(count)]
    if popularity == "identical":
        return [adapters[0]] * count
    if popularity == "uniform":
        return rng.choices(adapters, k=count)
    if popularity == "zipf":
        return rng.choices(adapters, [(k + 1) ** -ZIPF for k in range(len(adapters))], k=count)
    raise ValueError(f"popularity must be one of {', '.join(POPULARITIES)}, got {popularity!r}")
