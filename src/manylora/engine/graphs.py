"""DecodeGraphs: decode steps recorded as graphs, once for each batch size, and replayed on other contents.

A graph reads and writes fixed buffers. A step is padded to the next bucket of rows, its tensors are copied
into the buffers of that bucket's graph, and the graph is replayed: one launch in place of hundreds. The
key of a graph has whatever changes the launches: the bucket, the width class of the block table, the shape of
the LoRA batch. So a batch without adapters runs a graph without LoRA kernels. `Runner` also launches steps
plainly, and both give the same tokens.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.engine.inputs import StepInputs
from manylora.kernels.device import Capture
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import BatchLimits
from manylora.kernels.transfer import copy_into, to_device
from manylora.model.batch import ForwardBatch

logger = logging.getLogger("manylora")

FEWEST_COLUMNS = 16  # of a block table


@dataclass(frozen=True)
class _Graph:
    batch: ForwardBatch  # the buffers
    replay: Callable[[], Tensor]


class DecodeGraphs:
    """forward: logits of a batch. max_graphs: beyond that many, the least recently used one is dropped."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        ops: ReferenceOps,
        capture: Capture,
        device: torch.device,
        limits: BatchLimits,
        max_graphs: int,
    ) -> None:
        self.num_recorded = 0
        self._forward = forward
        self._ops = ops
        self._capture = capture
        self._device = device
        self._buckets = buckets_for(limits.max_sequences)
        self._columns = -(-limits.max_seq_len // limits.tokens_per_block)
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()

    def run(self, inputs: StepInputs) -> Tensor:
        """Logits [rows, vocab] float32 of a step that `decodes`; overwritten by the next call."""
        count = len(inputs.input_ids)
        rows = next(bucket for bucket in self._buckets if bucket >= count)
        width = width_class(max(map(len, inputs.blocks)), self._columns)
        batch = inputs.pad(rows).plan(self._ops, width, fixed=True)
        key = rows, width, getattr(batch.lora, "shape", None)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._record(key, batch, inputs)
        else:
            self._graphs.move_to_end(key)
            copy_into(graph.batch, batch)
            inputs.fill(graph.batch.input_ids)
        return graph.replay()[:count]

    def warm(self) -> None:
        """Record the base model's graphs for short sequences, so that the first requests do not wait for it.
        Graphs with adapters are recorded when their shape first appears."""
        started = time.perf_counter()
        for rows in self._buckets[::-1][: self._max_graphs]:  # the largest first: others share its memory
            self.run(StepInputs([0], [0], [0, 1], [1], [[0]], [-1], [0]).pad(rows))
        seconds = time.perf_counter() - started
        logger.info("recorded %d CUDA graphs in %.1f s", self.num_recorded, seconds)

    def _record(self, key: Hashable, batch: ForwardBatch, inputs: StepInputs) -> _Graph:
        buffers = to_device(batch, self._device)
        inputs.fill(buffers.input_ids)
        graph = _Graph(buffers, self._capture(lambda: self._forward(buffers)))
        # Only now: recording has waited for the previous step, whose graph may be the one to drop.
        while len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        self._graphs[key] = graph
        self.num_recorded += 1
        return graph


def buckets_for(max_rows: int) -> list[int]:
    """Batch sizes, ascending: dense where a padded row is a large part of a step."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_rows + 64, 64)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def width_class(columns: int, most: int) -> int:
    """Width of a recorded block table: 16 times a power of 4, at most what the longest sequence needs."""
    width = FEWEST_COLUMNS
    while width < columns:
        width *= 4
    return min(width, most)
