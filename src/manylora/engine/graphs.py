"""DecodeGraphs: decode steps captured as CUDA graphs, once per batch size, and replayed with new inputs.

A graph reads and writes fixed buffers. A step is padded to the next bucket of rows, its tensors are copied to
the buffers of that bucket's graph, and the graph is replayed: one launch instead of hundreds. A graph's key
consists of everything that changes the launches: the bucket, the width class of the block table, and the
shape of the LoRA batch. A batch without adapters therefore runs a graph without LoRA kernels. `Runner` can
also launch steps without graphs, and both give the same tokens.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manylora.engine.inputs import StateRows, StepInputs
from manylora.kernels.device import Capture
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import BatchLimits
from manylora.kernels.transfer import TableCopy, to_device
from manylora.model.batch import ForwardBatch

logger = logging.getLogger("manylora")

FEWEST_COLUMNS = 16  # of a block table
WARM_COLUMNS = (16, 64)  # of tables that are always recorded at start
WARM_SECONDS = 20.0  # after this time at start no wider ones are begun
MOST_FAILURES = 3  # failed recordings, after which none is tried
MOST_SHAPES = 1024  # shapes whose uses are counted

Key = tuple[int, int, Hashable]
"""Rows, columns of the block table, shape of the LoRA batch."""


@dataclass(frozen=True)
class _Graph:
    batch: ForwardBatch  # the buffers
    load: TableCopy  # copies tables to these buffers
    replay: Callable[[], Tensor]


class DecodeGraphs:
    """forward: returns logits. max_graphs: most recently used ones that are kept. plain_uses: how often a
    shape is launched plainly before it is recorded, because most shapes of batches with adapters do not
    recur.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        ops: ReferenceOps,
        capture: Capture,
        device: torch.device,
        limits: BatchLimits,
        max_graphs: int,
        plain_uses: int = 0,
    ) -> None:
        self.num_recorded = self.num_replayed = self.num_plain = self.num_failures = 0
        self._forward, self._ops, self._capture, self._device = forward, ops, capture, device
        self._buckets = buckets_for(limits.max_sequences)
        self._columns = -(-limits.max_seq_len // limits.tokens_per_block)
        self._max_graphs, self._plain_uses = max_graphs, plain_uses
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._uses: OrderedDict[Key, int] = OrderedDict()  # of shapes that are not recorded
        self._logits: Tensor | None = None  # shared by all graphs, see `_run_into_one`

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Logits of a step that `decodes`, until the next call. None: launch it without a graph."""
        logits = self._try_to_run(inputs)
        self.num_plain += logits is None
        self.num_replayed += logits is not None
        return logits

    def _try_to_run(self, inputs: StepInputs) -> Tensor | None:
        may_record = self.num_failures < MOST_FAILURES
        if not (self._graphs or may_record):
            return None
        count = len(inputs.input_ids)
        rows = next(bucket for bucket in self._buckets if bucket >= count)
        width = width_class(inputs.columns, self._columns)
        batch = inputs.pad(rows).plan(self._ops, width, fixed=True)
        key = rows, width, getattr(batch.lora, "shape", None)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.load(batch)
            inputs.fill(graph.batch.input_ids)
        elif may_record and self._is_due(key):
            graph = self._try_to_record(key, batch, inputs)
        return graph.replay()[:count] if graph is not None else None

    def warm(self, recurrent: bool = False) -> None:
        """Record the base model's graphs for common lengths, and longer ones while there is time and half of
        the graphs remain. recurrent: the model has recurrent layers.
        """
        state = StateRows([-1], [-1], [0], [-1]) if recurrent else None
        started, known = time.perf_counter(), self.num_recorded
        common = {width_class(columns, self._columns) for columns in WARM_COLUMNS}
        widths = [width_class(1, self._columns)]
        while widths[-1] < self._columns:
            widths.append(width_class(widths[-1] + 1, self._columns))
        # Largest first: the others share its memory.
        shapes = [(rows, width) for width in widths for rows in self._buckets[::-1]]
        plain_uses, self._plain_uses = self._plain_uses, 0
        for number, (rows, width) in enumerate(shapes):
            is_late = time.perf_counter() - started > WARM_SECONDS or number >= self._max_graphs // 2
            if number >= self._max_graphs or (is_late and width not in common):
                break
            blocks = [[0] * width]
            inputs = StepInputs([0], [0], [0, 1], [1], blocks, [-1], [0], state=state)
            if self._try_to_run(inputs.pad(rows)) is None:
                break
            self._graphs.move_to_end(next(reversed(self._graphs)), last=False)  # the longest is dropped first
        self._plain_uses = plain_uses
        made, seconds = self.num_recorded - known, time.perf_counter() - started
        text = "recorded %d CUDA graphs in %.1f s; %d longer shapes of the base model are at their second use"
        logger.info(text, made, seconds, len(shapes) - made)

    def _is_due(self, key: Key) -> bool:
        """Whether a shape has recurred often enough to be recorded."""
        uses = self._uses.pop(key, 0) + 1
        if uses > self._plain_uses:
            return True
        self._uses[key] = uses
        if len(self._uses) > MOST_SHAPES:
            self._uses.popitem(last=False)
        return False

    def _try_to_record(self, key: Key, batch: ForwardBatch, inputs: StepInputs) -> _Graph | None:
        """None: recording failed. If the step itself is faulty, launching it plainly raises its error."""
        try:
            return self._record(key, batch, inputs)
        except torch.OutOfMemoryError:  # drop the least recently used half
            num_kept = -(-len(self._graphs) // 2)
            if num_kept == len(self._graphs):  # none could be dropped
                self.num_failures += 1
            while len(self._graphs) > num_kept:
                self._graphs.popitem(last=False)
            text = "no memory is left to record a decode step: %d graphs are kept; lower %s"
            logger.warning(text, num_kept, "kv_cache_free_gpu_mem_fraction")
        except Exception:
            self.num_failures += 1
            logger.exception("a decode step could not be recorded: its shape is launched plainly")
        self._uses[key] = -self._plain_uses  # do not retry at its next use
        if self.num_failures == MOST_FAILURES:
            logger.error("recording has failed %d times: other shapes are launched plainly", MOST_FAILURES)
        return None

    def _record(self, key: Key, batch: ForwardBatch, inputs: StepInputs) -> _Graph:
        began = time.perf_counter()
        state = batch.state
        quiet = batch if state is None else replace(batch, state=state.storing_nothing())
        buffers = to_device(quiet, self._device)
        if buffers.lora is not None:  # kernels read only the tables; do not keep evicted adapters alive
            buffers = replace(buffers, lora=replace(buffers.lora, segments=()))
        inputs.fill(buffers.input_ids)
        replay = self._capture(lambda: self._run_into_one(buffers))
        graph = _Graph(buffers, TableCopy(buffers), replay)
        if state is not None:  # recording also runs the step, which may advance its states only once
            graph.load(batch)
            inputs.fill(buffers.input_ids)
        # Only now: recording has waited for the previous step, which may use the graph to be dropped.
        while len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        self._graphs[key] = graph
        self.num_recorded += 1
        if self._plain_uses:  # at start one line reports all of them
            seconds, adapters = time.perf_counter() - began, "with" if batch.lora else "without"
            text = (
                "recorded a decode step of %d rows, up to %d blocks each, %s adapters, in %.2f s; %d are kept"
            )
            logger.info(text, *key[:2], adapters, seconds, len(self._graphs))
        return graph

    def _run_into_one(self, batch: ForwardBatch) -> Tensor:
        """Write the logits to a tensor that all graphs share. Separate ones would take gigabytes."""
        logits = self._forward(batch)
        if self._logits is None:  # before anything is recorded: see `CudaCapture`
            shape = (self._buckets[-1], *logits.shape[1:])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._logits[: len(logits)].copy_(logits)


def buckets_for(max_rows: int) -> list[int]:
    """Batch sizes, ascending. Dense where a padded row is a large part of a step."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_rows + 64, 64)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def width_class(columns: int, most: int) -> int:
    """Width of a recorded block table: 16 times a power of 4, at most what the longest sequence needs."""
    width = FEWEST_COLUMNS
    while width < columns:
        width *= 4
    return min(width, most)
