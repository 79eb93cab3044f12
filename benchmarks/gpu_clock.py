"""Clock: median seconds of a call with the device's work, and what is left of the time allowed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manylora.kernels.device import Arrival, Device

__all__ = ["Clock"]


class Clock:
    """repeats: 0: the first call of each is the one that counts. deadline: of time.perf_counter."""

    def __init__(self, device: Device, repeats: int, deadline: float) -> None:
        self._device = device
        self._repeats = repeats
        self._deadline = deadline

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self._deadline - time.perf_counter()

    def sync(self) -> None:
        if self._device.torch.type == "cuda":
            torch.cuda.synchronize()

    def time(self, call: Callable[[], object], repeats: int | None = None) -> float:
        """Each call is waited for, as a step of the engine is. The first may compile and does not count."""
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
        """Mean seconds of a call, each made before the answer of the one before is on the host, as the engine
        makes its steps."""
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
        """Mean seconds of one of the calls, all launched together from one recorded graph."""

        def everything() -> Tensor:
            for call in calls:
                last = call()
            return last

        assert self._device.capture is not None
        return self.time(self._device.capture(everything)) / len(calls)
