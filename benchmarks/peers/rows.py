"""Results: a row for each case and concurrency, and the file format."""

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
    """One case at one concurrency, measured with one peer.

    at_once: requests per call. prompt: tokens of each. requests: per round. tokens: output tokens per
    request. ours_s, peer_s: seconds of each round, in pairs. ours_first_s, peer_first_s: seconds until all
    requests of a call have their first token, in pairs. ours_bytes, peer_bytes: resident bytes after the
    case, {"all", "own"}. same_first: share of requests whose first token is equal. others: CPUs that other
    processes used before and during the row.
    """

    model: str
    dtype: str
    case: str
    peer: str
    at_once: int
    prompt: int = 64
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
    date: str = ""
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str, str, int, int]:
        return self.model, self.dtype, self.case, self.peer, self.at_once, self.prompt

    @property
    def busy(self) -> bool:
        return self.others > QUIET

    def rate(self, whose: str) -> float:
        """Tokens per second in the median round. whose: "ours" or "peer"."""
        return self.requests * self.tokens / statistics.median(getattr(self, f"{whose}_s"))

    def first(self, whose: str) -> float:
        """Median seconds to the first token. whose: "ours" or "peer"."""
        return statistics.median(getattr(self, f"{whose}_first_s"))

    def ratio(self) -> float:
        """Our speed divided by theirs, as the median of the pairs."""
        return _ratio(self.peer_s, self.ours_s)

    def first_ratio(self) -> float:
        """Our time to first token divided by theirs. Less is better."""
        return _ratio(self.ours_first_s, self.peer_first_s)


@dataclass
class Found:
    """All results of one machine. limits: bandwidth in bytes/s; gemm, the rate in FLOPs/s."""

    machine: dict[str, Any]
    limits: dict[str, float]
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Add other results. Newer rows replace older ones, and each limit is the higher of both. Raises
        ValueError if they are from a different kind of machine."""
        mine, theirs = self.machine["short"], other.machine["short"]
        if mine != theirs:
            raise ValueError(f"figures of {theirs} cannot be added to those of {mine}")
        self.machine = other.machine
        self.limits = {name: max(rate, other.limits[name]) for name, rate in self.limits.items()}
        self.versions |= other.versions
        self.rows = list({row.key: row for row in [*self.rows, *other.rows]}.values())

    def good(self) -> list[Row]:
        return [row for row in self.rows if row.error is None]


def read(path: Path) -> Found:
    data = json.loads(path.read_text(encoding="utf-8"))
    return Found(data["machine"], data["limits"], data["versions"], [Row(**row) for row in data["rows"]])


def write(path: Path, found: Found) -> None:
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def _ratio(above: Iterable[float], below: Iterable[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
