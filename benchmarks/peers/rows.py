"""What was measured: a row for each case and number of requests at once, and files of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import QUIET


@dataclass
class Row:
    """Of one case, so many requests at once, beside one peer.

    ours_s, peer_s: seconds of each round, in pairs. requests: of a round, in calls of `at_once`. tokens: new
    ones of each request. ours_first_s, peer_first_s: seconds until all requests of a call have their first
    token, in pairs. ours_bytes, peer_bytes: resident after the case, {"all", "own"}. same_first: share of
    requests whose first token both agree on. others: CPUs that others used, before and during. limit: tokens
    per second that bandwidth and GEMM rate allow, step_limit: seconds of a step at them. flow: our tokens per
    second with requests in flight.
    """

    model: str
    dtype: str
    case: str
    peer: str
    at_once: int
    requests: int = 0
    tokens: int = 0
    ours_s: list[float] = field(default_factory=list)
    peer_s: list[float] = field(default_factory=list)
    ours_first_s: list[float] = field(default_factory=list)
    peer_first_s: list[float] = field(default_factory=list)
    ours_bytes: dict[str, int] = field(default_factory=dict)
    peer_bytes: dict[str, int] = field(default_factory=dict)
    same_first: float = 0.0
    others: float = 0.0
    limit: float | None = None
    step_limit: float | None = None
    flow: float | None = None
    date: str = ""
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.model, self.dtype, self.case, self.peer, self.at_once

    @property
    def busy(self) -> bool:
        return self.others > QUIET

    def rate(self, whose: str) -> float:
        """Tokens per second of "ours" or "peer", by the median round."""
        return self.requests * self.tokens / statistics.median(getattr(self, f"{whose}_s"))

    def first(self, whose: str) -> float:
        """Seconds, the median."""
        return statistics.median(getattr(self, f"{whose}_first_s"))

    def ratio(self) -> float:
        """Our speed by theirs, the median of the pairs."""
        return _ratio(self.peer_s, self.ours_s)

    def first_ratio(self) -> float:
        """Our time to the first token by theirs: less is better."""
        return _ratio(self.ours_first_s, self.peer_first_s)

    def memory_ratio(self) -> float:
        return self.ours_bytes["all"] / self.peer_bytes["all"]

    def step(self) -> float:
        """Our seconds between two tokens: those after the first."""
        calls = self.requests / self.at_once
        return (statistics.median(self.ours_s) / calls - self.first("ours")) / (self.tokens - 1)


@dataclass
class FirstUse:
    """Seconds to the first token of single requests, in pairs: without an adapter, under one that was never
    used, and under it again."""

    model: str
    dtype: str
    adapters: str
    peer: str
    ours_s: dict[str, list[float]]
    peer_s: dict[str, list[float]]
    others: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.model, self.dtype, self.adapters, self.peer


@dataclass
class Found:
    """A file of figures. limits: bandwidth in bytes/s, GEMM rate in FLOPs/s, and wide: bytes of a key or a
    value of bfloat16 models."""

    machine: dict[str, Any]
    limits: dict[str, float]
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    first_use: list[FirstUse] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Of the same kind of machine: raises ValueError if it is not. A newer row replaces an older one, and
        the limits that were measured are the best of both."""
        mine, theirs = self.machine["short"], other.machine["short"]
        if mine != theirs:
            raise ValueError(f"figures of {theirs} cannot be added to those of {mine}")
        self.machine = other.machine
        self.limits = {name: max(rate, other.limits[name]) for name, rate in self.limits.items()}
        self.versions |= other.versions
        self.rows = list({row.key: row for row in [*self.rows, *other.rows]}.values())
        uses = {use.key: use for use in [*self.first_use, *other.first_use]}
        self.first_use = list(uses.values())

    def good(self) -> list[Row]:
        return [row for row in self.rows if row.error is None]


def read(path: Path) -> Found:
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in data["rows"]]
    uses = [FirstUse(**use) for use in data["first_use"]]
    return Found(data["machine"], data["limits"], data["versions"], rows, uses)


def write(path: Path, found: Found) -> None:
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def _ratio(above: Iterable[float], below: Iterable[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
