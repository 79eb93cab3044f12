"""CUDA graphs: record a function's kernels once, launch them all together afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Output = TypeVar("Output")


class CudaCapture:
    """Records on one device. All graphs share a memory pool: a replay may overwrite another graph's
    output, so each output must be used before the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all graphs, as memory allocated on a stream is reused on that stream only.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """function: reads and writes tensors at fixed addresses. It runs once before the recording, to
        compile kernels and allocate workspaces."""
        stream, present = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            function()
        present.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may wait for copies of adapters meanwhile, which `global` forbids.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                output = function()
        finally:  # where the end of a failed recording fails too, torch leaves the thread on its stream
            torch.cuda.set_stream(present)

        def replay() -> Output:
            graph.replay()
            return output

        return replay


def is_recording() -> bool:
    """Whether what this thread launches is recorded."""
    return torch.cuda.is_current_stream_capturing()


class SecondStream:
    """Of a device, for what may run beside the present stream's work: `fork`, more work, `join`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched inside runs after what the present stream has, and beside what it gets next."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the present stream gets from now on waits for the second one's work. Memory of the second
        stream may be used then: it is given out again only behind another fork."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
