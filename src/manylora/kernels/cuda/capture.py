"""CUDA graphs: record a function's kernels once, and launch them all together afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Output = TypeVar("Output")


class CudaCapture:
    """Records on one device. All graphs share a memory pool, so a replay may overwrite another graph's
    output. Each output must be used before the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all graphs, because memory allocated on a stream is reused only on that stream.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """function: reads and writes tensors at fixed addresses. It runs once before the recording, to
        compile kernels and allocate workspaces.
        """
        stream, present = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            function()
        present.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may wait for adapter copies meanwhile, which `global` forbids.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                output = function()
        finally:  # if ending a failed recording fails, torch leaves the thread on its stream
            torch.cuda.set_stream(present)

        def replay() -> Output:
            graph.replay()
            return output

        return replay


def is_recording() -> bool:
    """Whether the launches of this thread are being recorded."""
    return torch.cuda.is_current_stream_capturing()


class SecondStream:
    """A second stream of a device, for work concurrent with the current stream: `fork`, more work, `join`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches inside run after the current stream's work so far, and concurrently with its later
        work.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Later work of the current stream waits for the second stream. It may then use the second stream's
        memory, which is reused only after another fork.
        """
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
