"""CUDA graphs: record a function's kernels once, launch them all together afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["CudaCapture"]


class CudaCapture:
    """Records on one device. All graphs share one pool of memory: a replay may overwrite the output of
    another graph, so an output is used up before the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: what is allocated on a stream serves that stream alone.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """function: reads and writes tensors that stay where they are. It runs once before it is recorded,
        so that kernels are compiled and workspaces allocated."""
        stream, present = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            function()
        present.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Meanwhile other threads may wait for copies of adapters, which a global recording would forbid.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = function()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
