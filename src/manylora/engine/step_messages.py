"""What rank 0 tells the other ranks of a group to do, as messages. Arrays cross as their bytes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

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
    arrays = {name: np.asarray(getattr(inputs, name), np.int64) for name in INTS}
    arrays["blocks"] = block_table(inputs.blocks).numpy()
    for name in SOMETIMES:
        if getattr(inputs, name) is not None:
            arrays[name] = np.asarray(getattr(inputs, name), np.int64)
    if inputs.state is not None:
        state = inputs.state
        arrays["state"] = np.asarray((state.reads, state.writes, state.cuts, state.saves), np.int64)
    if len(inputs.cross_blocks):
        arrays["cross_blocks"] = block_table(inputs.cross_blocks).numpy()
        arrays["cross_lengths"] = np.asarray(inputs.cross_lengths, np.int64)
    if inputs.embeddings is not None:
        rows, vectors = inputs.embeddings
        arrays["rows"], arrays["vectors"] = rows.cpu().numpy(), vectors.float().cpu().numpy()
    values = {"names": list(arrays), "adapters": list(inputs.adapters)}
    values["virtual"] = list(inputs.virtual)
    return Message(what, values, list(arrays.values()))


def step_inputs(message: Message) -> StepInputs:
    """What `step_message` was made of, without the LoRA table. Embeddings are on the host, in float32."""
    arrays = dict(zip(message.values["names"], message.arrays, strict=True))
    found = {name: arrays[name].tolist() if name in LISTS else arrays[name] for name in arrays}
    rows, vectors = found.pop("rows", None), found.pop("vectors", None)
    if rows is not None:
        found["embeddings"] = torch.from_numpy(rows), torch.from_numpy(vectors)
    if "state" in found:
        found["state"] = StateRows(*found["state"].tolist())
    adapters = [(start, stop, members) for start, stop, members in message.values["adapters"]]
    virtual = [(row, number) for row, number in message.values["virtual"]]
    return StepInputs(**found, adapters=adapters, virtual=virtual)


def write_message(adapter: Adapter, pages: Sequence[int]) -> Message:
    """The whole adapter is to be written into these pages on the host, as far as a rank holds it."""
    rows = []
    for row in adapter.rows:
        numbers = int(row.format.rank), bool(row.format.dora), int(row.format.encoding)
        rows.append((row.module_id, row.layer, *numbers, float(row.format.scale)))
    extras = [(extra.name, extra.token_ids) for extra in adapter.extras]
    arrays = [*(row.payload for row in adapter.rows), *(extra.values for extra in adapter.extras)]
    values = {"digest": adapter.digest, "pages": list(pages), "rows": rows, "extras": extras}
    return Message(WRITE, values, arrays)


def written_adapter(message: Message) -> Adapter:
    """The adapter of a `write_message`."""
    values, arrays = message.values, iter(message.arrays)
    rows = tuple(
        AdapterRow(module_id, layer, RowFormat(rank, dora, Encoding(encoding), scale), next(arrays))
        for module_id, layer, rank, dora, encoding, scale in values["rows"]
    )
    extras = tuple(LoraExtra(name, next(arrays), tuple(ids)) for name, ids in values["extras"])
    return Adapter(values["digest"], rows, extras)


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
