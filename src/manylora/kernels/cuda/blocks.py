"""Chooses block sizes, kernels, and the order of a layer's launches: the fastest of a few candidates,
measured once per kind of shape.

The order of sums depends on the block size. It is therefore chosen by the shape of a layer, never by a
batch's contents, and the choice is stored on disk for the GPU and the version of triton. Measurements run
only inside `measuring`, so never in a step or a recording. Shapes that were not measured use their first
candidate.
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
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TypeVar

import torch
import triton

from manylora.kernels.cuda.capture import CudaCapture
from manylora.kernels.cuda.launch import is_compiling

logger = logging.getLogger("manylora")

MOST_SECONDS = 30.0  # of measuring per start; most of it is compilation, which is cached
REPEATS = 5
NOISE = 0.05  # relative: smaller differences in time count as equal
FLUSH_BYTES = 2**28  # more than any GPU's L2 cache, because a step reads adapters from memory

Clock = Callable[[Callable[[], object]], float]
"""Seconds that a call takes on the device."""


@dataclass(frozen=True)
class Blocks:
    """size: along the kernel's main dimension. warps, stages: triton's num_warps and num_stages. splits:
    parts of a sum, each computed by its own program and added in order.
    """

    size: int
    warps: int = 4
    stages: int = 3
    splits: int = 1

    def __str__(self) -> str:
        parts = f", {self.splits} parts" if self.splits > 1 else ""
        return f"{self.size}, {self.warps} warp{'s' * (self.warps > 1)}, {self.stages} stages{parts}"


@dataclass(frozen=True)
class Order:
    """How a linear layer's product, shrink and expand kernels overlap in a recording. By default each starts
    when the previous one has ended.

    beside: the shrink runs on a second stream, concurrently with the product. early: shrink and expand are
    launched while the previous kernel is ending, and wait for it (from Hopper on).
    """

    beside: bool = False
    early: bool = False


IN_TURN = Order()
ORDERS = (IN_TURN, Order(beside=True), Order(early=True))
Choice = Blocks | Order | str  # str: the name of a kernel
Candidate = TypeVar("Candidate", Blocks, Order, str)
_KINDS: dict[int, type[Blocks] | type[Order]] = {len(fields(kind)): kind for kind in (Blocks, Order)}


class BlockChooser:
    """clock: None: always use the first candidate. path: file that stores choices; None: no file.

    recorded_clock: measures what runs in a recording; None: always use the first order.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        path: Path | None = None,
        now: Callable[[], float] = time.monotonic,
        recorded_clock: Clock | None = None,
    ) -> None:
        self._clock, self._path, self._now = clock, path, now
        self._recorded_clock = recorded_clock
        self._chosen: dict[str, Choice] = _read(path) if path is not None else {}
        self._until: float | None = None

    @property
    def chosen(self) -> Mapping[str, Choice]:
        """The choices by shape, measured in this process or earlier."""
        return self._chosen

    @property
    def can_measure(self) -> bool:
        return self._clock is not None

    @property
    def is_measuring(self) -> bool:
        return self._until is not None

    @contextmanager
    def measuring(self, seconds: float = MOST_SECONDS) -> Iterator[None]:
        """Inside, a new shape is measured when its kernel is launched, up to this many seconds in total."""
        known, self._until = len(self._chosen), self._now() + seconds
        started = self._now()
        try:
            yield
        finally:
            self._until = None
            made = len(self._chosen) - known
            if made:
                logger.info("measured what suits %d shapes in %.1f s", made, self._now() - started)
                self._write()

    def choose(
        self, shape: str, candidates: Sequence[Candidate], launch: Callable[[Candidate], object]
    ) -> Candidate:
        """shape: names the kernel and everything its speed depends on except a batch's contents. launch: runs
        a candidate; may be called many times. Candidates that raise are not chosen. Among those within NOISE
        of the fastest, the first is chosen.
        """
        return self._choose(shape, candidates, launch, self._clock)

    def choose_order(self, shape: str, orders: Sequence[Order], launch: Callable[[Order], object]) -> Order:
        """As `choose`. launch: runs the layer, which is measured in a recording, where nothing is chosen."""

        def run(order: Order) -> None:
            until, self._until = self._until, None
            try:
                launch(order)
            finally:
                self._until = until

        return self._choose(shape, orders, run, self._recorded_clock)

    def _choose(
        self,
        shape: str,
        candidates: Sequence[Candidate],
        launch: Callable[[Candidate], object],
        clock: Clock | None,
    ) -> Candidate:
        known = self._chosen.get(shape)
        if known in candidates:  # the file may be from another version
            return candidates[candidates.index(known)]
        if clock is None or self._until is None or self._now() > self._until:
            return candidates[0]
        if is_compiling():  # compile all of them in parallel now; measure later
            for blocks in candidates[1:]:
                launch(blocks)
            return candidates[0]
        seconds = [self._time(shape, launch, candidate, clock) for candidate in candidates]
        limit = min(seconds) * (1 + NOISE)
        best = next(c for c, taken in zip(candidates, seconds, strict=True) if taken <= limit)
        if limit < float("inf"):
            self._chosen[shape] = best
        return best

    @staticmethod
    def _time(shape: str, launch: Callable[[Candidate], object], candidate: Candidate, clock: Clock) -> float:
        try:
            return clock(lambda: launch(candidate))
        except torch.OutOfMemoryError:
            raise
        except (triton.TritonError, RuntimeError) as error:
            # Too large for this GPU, a compiler error, or refused by the driver: use the others.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.info("%s: %s is not used: %s", shape, candidate, reason)
            return float("inf")

    def _write(self) -> None:
        """Replace the file atomically, because other processes may write it, too. If that fails, the next
        start measures again.
        """
        if self._path is None:
            return
        content = {
            shape: chosen if isinstance(chosen, str) else list(astuple(chosen))
            for shape, chosen in sorted(self._chosen.items())
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            Path(name).replace(self._path)
        except OSError as error:
            logger.warning("block sizes cannot be kept in %s: %s", self._path.parent, error)


def device_chooser(device: torch.device) -> BlockChooser:
    """A chooser that measures on a GPU. On other devices it does not measure."""
    if device.type != "cuda":
        return BlockChooser()
    name = f"{torch.cuda.get_device_name(device)}-triton-{triton.__version__}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-").lower()
    clock = _device_clock(device)
    path = base / "manylora" / f"blocks-{slug}.json"

    def recorded(call: Callable[[], object]) -> float:
        return clock(CudaCapture(device)(call))

    return BlockChooser(clock, path, recorded_clock=recorded)


def _device_clock(device: torch.device) -> Clock:
    """The shortest time of several calls, each with a cold cache."""

    def clock(call: Callable[[], object]) -> float:
        # Allocated per measurement, because later the KV cache and the graphs need the memory.
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
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

    return clock


def _read(path: Path) -> dict[str, Choice]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            shape: one if isinstance(one, str) else _KINDS[len(one)](*one) for shape, one in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        logger.warning("%s is not used: %s", path, error)
        return {}
