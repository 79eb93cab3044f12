"""What rank 0 tells the other ranks of a group to do, as messages."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from manylora.adapters.slicing import AdapterPart
from manylora.adapters.tensors import Adapter, AdapterRow, FileAdapter
from manylora.engine.inputs import StateRows, StepInputs, block_table
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.ranks.channel import Message
from manylora.ranks.leader import Leader
from manylora.request import LoraExtra

INTS = ("input_ids", "positions", "starts", "lengths", "slots", "logits_rows", "pooled_rows")
SOMETIMES = ("rope_lengths", "token_types")  # None where every row has the usual one
LISTS = ("starts", "lengths", "cross_lengths")  # that operations read as lists
FORWARD, ENCODE, LOAD, END = "forward", "encode", "load", "end"
COPY_BLOCKS, COPY_STATES = "copy_blocks", "copy_states"
WRITE, KEEP, RESTORE, DROP = "write", "keep", "restore", "drop"  # beside the steps


def step_message(what: str, inputs: StepInputs) -> Message:
    """what: FORWARD or ENCODE."""
    inputs = inputs.known()
    names = [*INTS, *(name for name in SOMETIMES if getattr(inputs, name) is not None)]
    values: dict[str, Any] = {name: np.asarray(getattr(inputs, name), np.int64) for name in names}
    values |= {"blocks": block_table(inputs.blocks).numpy(), "adapters": inputs.adapters}
    values["virtual"] = inputs.virtual
    if (state := inputs.state) is not None:
        values["state"] = np.asarray((state.reads, state.writes, state.cuts, state.saves), np.int64)
    if len(inputs.cross_blocks):
        values["cross_blocks"] = block_table(inputs.cross_blocks).numpy()
        values["cross_lengths"] = np.asarray(inputs.cross_lengths, np.int64)
    if inputs.embeddings is not None:
        rows, vectors = inputs.embeddings
        values["embeddings"] = rows.cpu().numpy(), vectors.float().cpu().numpy()
    return Message(what, values)


def step_inputs(message: Message) -> StepInputs:
    """What `step_message` was made of, without the LoRA table. Embeddings are on the host, in float32."""
    found = {name: value.tolist() if name in LISTS else value for name, value in message.values.items()}
    if "embeddings" in found:
        found["embeddings"] = tuple(map(torch.from_numpy, found["embeddings"]))
    if "state" in found:
        found["state"] = StateRows(*found["state"].tolist())
    return StepInputs(**found)


def write_message(adapter: Adapter, pages: Sequence[int]) -> Message:
    """The whole adapter is to be written into these pages on the host, as far as a rank holds it."""
    rows = []
    for row in adapter.rows:
        numbers = int(row.format.rank), bool(row.format.dora), int(row.format.encoding)
        rows.append((row.module_id, row.layer, *numbers, float(row.format.scale), row.payload))
    extras = [(extra.name, extra.values, extra.token_ids) for extra in adapter.extras]
    return Message(WRITE, {"digest": adapter.digest, "pages": list(pages), "rows": rows, "extras": extras})


def written_adapter(message: Message) -> Adapter:
    """The adapter of a `write_message`."""
    rows = tuple(
        AdapterRow(module_id, layer, RowFormat(rank, dora, Encoding(encoding), scale), payload)
        for module_id, layer, rank, dora, encoding, scale, payload in message.values["rows"]
    )
    extras = tuple(LoraExtra(name, found, tuple(ids)) for name, found, ids in message.values["extras"])
    return Adapter(message.values["digest"], rows, extras)


class Others:
    """What `AdapterStore` has the other ranks do."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._dropped: deque[str] = deque()  # no lock: a finaliser may run while its thread has one

    def write(self, adapter: Adapter | FileAdapter, pages: Sequence[int]) -> None:
        assert isinstance(adapter, Adapter), "with several ranks, files are read before"
        if isinstance(adapter, AdapterPart):
            self._ask(Message(RESTORE, {"digest": adapter.digest, "pages": list(pages)}))
        else:
            self._ask(write_message(adapter, pages))

    def keep(self, part: Adapter, pages: Sequence[int]) -> None:
        self._ask(Message(KEEP, {"digest": part.digest, "pages": list(pages)}))
        weakref.finalize(part, self._dropped.append, part.digest).atexit = False

    def load(self, digest: str, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        pages = {"pages": list(device_pages), "host": list(host_pages)}
        self._leader.tell(Message(LOAD, {"digest": digest, **pages}))

    def _ask(self, message: Message) -> None:
        while self._dropped:
            self._leader.ask(Message(DROP, {"digest": self._dropped.popleft()}))
        self._leader.ask(message)
