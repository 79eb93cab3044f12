"""Clock: measures calls including the device's work, and keeps the time budget."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manylora.kernels.device import Arrival, Device


class Clock:
    """repeats: measured calls after a warm-up call; 0 for a single call without warm-up. deadline: a time of
    time.perf_counter."""

    def __init__(self, device: Device, repeats: int, deadline: float) -> None:
        self._device = device
        self._repeats = repeats
        self._deadline = deadline

    @property
    def left(self) -> float:
        """Seconds left in the budget; negative after the deadline."""
        return self._deadline - time.perf_counter()

    def sync(self) -> None:
        if self._device.torch.type == "cuda":
            torch.cuda.synchronize()

    def time(self, call: Callable[[], object], repeats: int | None = None) -> float:
        """Median seconds of a call. Waits for each call. The first call may compile and does not count."""
        if self._repeats:
            call()
        taken = []
        for _ in range(max(1, min(repeats or self._repeats, self._repeats))):
            self.sync()
            began = time.perf_counter()
            call()
            self.sync()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def time_steps(self, call: Callable[[], Tensor]) -> float:
        """Mean seconds of a call when calls overlap: each is launched before the previous result is on the
        host, like the engine's steps."""
        if self._repeats:
            call()
        self.sync()
        count = 2 * max(1, self._repeats)
        before, began = Arrival(call()), time.perf_counter()
        for _ in range(count):
            after = Arrival(call())
            before.wait()
            before = after
        before.wait()
        return (time.perf_counter() - began) / count

    def time_kernels(self, calls: Sequence[Callable[[], Tensor]]) -> float:
        """Mean seconds per call when all calls are launched from one captured graph."""

        def everything() -> Tensor:
            for call in calls:
                last = call()
            return last

        assert self._device.capture is not None
        return self.time(self._device.capture(everything)) / len(calls)
