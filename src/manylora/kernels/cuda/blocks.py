"""Which block sizes a kernel runs with: the fastest of a few, measured once for each class of shape.

How a row is summed depends on them, so a choice is made by what a layer is, never by the contents of a
batch, and stays: it is kept on disk for the GPU and the version of triton. Measured is only while `measuring`
is open, which no step and no recording is; a class that was not seen there keeps the first of its candidates.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

__all__ = ["BlockChooser", "Blocks", "device_chooser"]

logger = logging.getLogger("manylora")

MOST_SECONDS = 30.0  # of measuring at one start; most of it is compiling, and only the first time
REPEATS = 5
FLUSH_BYTES = 2**28  # more than any GPU's second-level cache: a step finds an adapter in memory, not there

Clock = Callable[[Callable[[], object]], float]
"""Seconds of a call on the device."""


@dataclass(frozen=True)
class Blocks:
    """size: of the dimension that a kernel goes through or is cut along. warps, stages: triton's."""

    size: int
    warps: int = 4
    stages: int = 3


class BlockChooser:
    """clock: None: the first candidate always. path: where choices are kept, None: nowhere."""

    def __init__(
        self,
        clock: Clock | None = None,
        path: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._path, self._now = clock, path, now
        self._chosen: dict[str, Blocks] = _read(path) if path is not None else {}
        self._until: float | None = None

    @property
    def chosen(self) -> Mapping[str, Blocks]:
        """By shape, what was measured here or before."""
        return self._chosen

    @property
    def can_measure(self) -> bool:
        return self._clock is not None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, a class that is new is measured when its kernel is launched, for MOST_SECONDS in all."""
        known, self._until = len(self._chosen), self._now() + MOST_SECONDS
        started = self._now()
        try:
            yield
        finally:
            self._until = None
            made = len(self._chosen) - known
            if made:
                logger.info("measured block sizes of %d shapes in %.1f s", made, self._now() - started)
                self._write()

    def choose(self, shape: str, candidates: Sequence[Blocks], launch: Callable[[Blocks], object]) -> Blocks:
        """shape: the kernel and everything its speed depends on but a batch's contents. launch: with those
        blocks; it may run many times."""
        known = self._chosen.get(shape)
        if known is not None and known in candidates:  # a file may be of another version
            return known
        if self._clock is None or self._until is None or self._now() > self._until:
            return candidates[0]
        seconds = [self._time(launch, blocks) for blocks in candidates]
        self._chosen[shape] = candidates[seconds.index(min(seconds))]
        return self._chosen[shape]

    def _time(self, launch: Callable[[Blocks], object], blocks: Blocks) -> float:
        assert self._clock is not None
        try:
            return self._clock(lambda: launch(blocks))
        except triton.TritonError:  # not for this GPU: it lacks shared memory, or its compiler refuses
            return float("inf")

    def _write(self) -> None:
        """Whole or not at all; another process may do the same. Without a place to write, the choice is made
        again at the next start."""
        if self._path is None:
            return
        content = {shape: [b.size, b.warps, b.stages] for shape, b in sorted(self._chosen.items())}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            Path(name).replace(self._path)
        except OSError as error:
            logger.warning("block sizes cannot be kept in %s: %s", self._path.parent, error)


def device_chooser(device: torch.device) -> BlockChooser:
    """On a GPU one that measures there; elsewhere one that does not."""
    if device.type != "cuda":
        return BlockChooser()
    name = f"{torch.cuda.get_device_name(device)}-triton-{triton.__version__}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return BlockChooser(_DeviceClock(device), base / "manylora" / f"blocks-{_slug(name)}.json")


class _DeviceClock:
    """The least of some calls, each of which finds a cold cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, call: Callable[[], object]) -> float:
        flush = self._flush()
        call()  # compiles
        taken = []
        for _ in range(REPEATS):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
            start.record()
            call()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        return min(taken)

    def _flush(self) -> Tensor:
        """Not kept: the memory is the KV cache's and the graphs' afterwards."""
        return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self._device)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-").lower()


def _read(path: Path) -> dict[str, Blocks]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {shape: Blocks(size, warps, stages) for shape, (size, warps, stages) in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("%s is not used: %s", path, error)
        return {}
