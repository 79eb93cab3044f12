"""DecodeStep: a decoder's step as one call of compiled code, where all rows are attended one by one.

Those are the tokens that are decoded, and short prompts.

Called from Python, the operations of a small model take as long to call as to run. The same ones, in the
same order, are called from C here, so that a row's bits are those of `Decoder.forward`.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from manylora.kernels.panels import Panels, address
from manylora.kernels.spec import AttentionBatch, AttentionParams, LoraBatch, LoraTarget, Rotary, Weight

# Tokens of a prompt that is attended row by row: no slower than torch's attention, without its start.
SHORT = 256
MOST_ROWS = 1024  # that pass through the layers together
MOST_SCORES = 2**26  # of all rows and heads, for each token of the longest sequence
LINEARS = 4  # of a layer
CALLS = 2  # for the adapters of a linear layer: a fused projection's, then those of its parts
NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm")
SIZES = (
    "layers", "hidden", "heads", "kv_heads", "dim", "size", "inner", "widest", "activation", "norm_heads",
    "pairs",
)  # fmt: skip


def _structure(*fields: str | tuple[Any, ...]) -> np.dtype:
    """As in native/decoder.c. A name alone is that of a pointer or an int64."""
    named = [(field, "i8") if isinstance(field, str) else field for field in fields]
    return np.dtype(named, align=True)


WEIGHT = _structure("w", "scale", "offset", "bias", "kind", "in", "out", "group")
LAYER = _structure(
    *NORMS, ("linear", WEIGHT, LINEARS), "keys", "values", "window", "rotary", ("scale", "f4"), ("cap", "f4")
)
DECODER = _structure("layer", *SIZES, "norm", ("head", WEIGHT), ("eps", "f4"))
STEP = _structure(
    *("x", "logits", "memory", ("cos", "i8", 2), ("sin", "i8", 2), "slots", "lengths", "wanted", "table"),
    *("adapters", "last", "pool", "pool_kind", "rows", "turned", "columns", "longest", "wanted_rows"),
)
ADAPTERS = _structure("segments", "count", "parts", "rows")
POOLS = (torch.float32, torch.bfloat16)  # by their numbers in native/vectors.h


@dataclass(frozen=True)
class LinearParts:
    """weight: packed. targets: of its adapters."""

    weight: Weight
    bias: Tensor | None
    targets: tuple[LoraTarget, ...] = ()


@dataclass(frozen=True)
class LayerParts:
    """norms: by their names in NORMS, None where there is none. linears: qkv, out, up and gate, down.
    rotary: which of a step's; -1: none."""

    norms: dict[str, Tensor | None]
    linears: tuple[LinearParts, LinearParts, LinearParts, LinearParts]
    params: AttentionParams
    rotary: int


@dataclass(frozen=True)
class DecoderParts:
    """A decoder whose layers are RMS norms, attention and a gated MLP, each added to the residual stream.

    norm_heads: q and k are normalised head by head. pairs: neighbours are rotated together. activation: its
    number in native/elementwise.c. eps: of all norms.
    """

    layers: tuple[LayerParts, ...]
    norm: Tensor
    head: LinearParts
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    norm_heads: bool
    pairs: bool
    activation: int
    eps: float

    def linears(self) -> list[LinearParts]:
        return [one for layer in self.layers for one in layer.linears]

    @property
    def is_plain(self) -> bool:
        """Whether the compiled step can do it: weights are panels, all else is float32."""
        others = [norm for layer in self.layers for norm in layer.norms.values()]
        others += [self.norm, *(one.bias for one in (self.head, *self.linears()))]
        plain = all(one is None or (one.dtype == torch.float32 and one.is_contiguous()) for one in others)
        return plain and all(isinstance(one.weight, Panels) for one in (self.head, *self.linears()))


class Adapters(Protocol):
    """The arguments of native/lora.c for the targets of a layer that share no column.

    others: segments that other code must do.
    """

    @property
    def segments(self) -> np.ndarray: ...
    @property
    def most_parts(self) -> int: ...
    @property
    def most_rows(self) -> int: ...
    @property
    def others(self) -> Sequence[object]: ...


FindAdapters = Callable[[LoraBatch, int, tuple[LoraTarget, ...]], Sequence[Adapters]]


class DecodeStep:
    """parts: must be plain. find: the adapters of a layer's linear, the same list until segments change."""

    def __init__(self, library: ctypes.CDLL, parts: DecoderParts, find: FindAdapters) -> None:
        self._library, self._parts, self._find = library, parts, find
        self._memory = torch.empty(1)
        self._kv: Tensor | None = None
        self._adapters: tuple[list[Any], np.ndarray | None] = ([], None)
        self._layers = np.zeros(len(parts.layers), LAYER)
        for row, layer in zip(self._layers, parts.layers, strict=True):
            for name, norm in layer.norms.items():
                row[name] = address(norm) or 0
            row["linear"] = [_weight(one) for one in layer.linears]
            row["rotary"] = layer.rotary
            row["window"] = -1 if layer.params.window is None else layer.params.window
            row["scale"], row["cap"] = layer.params.scale, layer.params.softcap or 0
        self._decoder = np.zeros(1, DECODER)
        self._decoder["layer"] = self._layers.ctypes.data
        for name in {*SIZES, "eps"} - {"layers", "size", "widest"}:
            self._decoder[name] = getattr(parts, name)
        self._decoder["layers"] = len(parts.layers)
        self._decoder["widest"] = max(max(w.rows, w.columns) for w in map(_panels, parts.linears()))
        self._decoder["norm"], self._decoder["head"] = parts.norm.data_ptr(), _weight(parts.head)

    def __call__(
        self,
        x: Tensor,
        rotary: list[Rotary],
        batch: AttentionBatch,
        lora: LoraBatch | None,
        kv: Tensor,
        logits_rows: Tensor,
    ) -> Tensor | None:
        """Logits [L, vocab] float32, or None where something must be done by other code.

        x [T, hidden] float32, is changed. logits_rows [L], ascending. The rest as for `Decoder.forward`.
        """
        plain = x.dtype == kv.dtype == torch.float32 and x.is_contiguous()
        if not plain or (lora is not None and lora.extras):
            return None
        slices = _slices(len(x))
        if slices[0].stop * self._parts.heads * max(batch.kv_lens) > MOST_SCORES:
            return None
        tables = _one_by_one(batch)
        adapters = None if lora is None else self._find_adapters(lora)
        if tables is None or (lora is not None and (adapters is None or lora.pool.dtype not in POOLS)):
            return None
        if kv is not self._kv:
            self._place(kv)
        table, ends = tables
        turns = [part.contiguous() for pair in rotary for part in pair]
        logits = torch.empty(len(logits_rows), _panels(self._parts.head).rows)
        borders = np.searchsorted(logits_rows.numpy(), [rows.stop for rows in slices])
        for rows, first, last in zip(slices, [0, *borders], borders, strict=False):
            wanted = logits_rows[first:last]
            step = self._step_of(rows, x, turns, table, ends, batch.slots)
            among = wanted - rows.start
            step["logits"] = logits[first:last].data_ptr()
            step["wanted"], step["wanted_rows"] = among.data_ptr(), len(among)
            step["longest"] = max(batch.kv_lens)
            if lora is not None and adapters is not None:
                used = adapters
                if len(slices) > 1:
                    these = self._narrow_adapters(np.arange(rows.start, rows.stop))
                    used = these.table
                step["adapters"], step["pool"] = used.ctypes.data, lora.pool.data_ptr()
                step["pool_kind"] = POOLS.index(lora.pool.dtype)
                if len(wanted) < rows.stop - rows.start:
                    narrowed = self._narrow_adapters(wanted.numpy(), LINEARS)
                    step["last"] = narrowed.table.ctypes.data
            self._run(step)
        return logits

    def _step_of(
        self, rows: slice, x: Tensor, turns: list[Tensor], table: Tensor, ends: np.ndarray, slots: Tensor
    ) -> np.ndarray:
        """STEP for some rows, of tensors for all of them; without logits and adapters."""
        step = np.zeros((), STEP)
        cos, sin = ([part[rows].data_ptr() for part in turns[i::2]] for i in (0, 1))
        step["x"], step["slots"] = x[rows].data_ptr(), slots[rows].data_ptr()
        step["cos"][: len(cos)], step["sin"][: len(sin)] = cos, sin
        step["lengths"], step["table"] = ends[rows].ctypes.data, table[rows].data_ptr()
        step["columns"] = table.shape[1]
        step["rows"], step["turned"] = rows.stop - rows.start, turns[0].shape[1] if turns else 0
        return step

    def _run(self, step: np.ndarray) -> None:
        decoder = self._decoder.ctypes.data
        size = self._library.decode_memory(decoder, step.ctypes.data)
        if self._memory.numel() < size:
            self._memory = torch.empty(2 * size)
        step["memory"] = self._memory.data_ptr()
        self._library.decode_step(decoder, step.ctypes.data)

    def _place(self, kv: Tensor) -> None:
        """kv [layers, 2, blocks, size, kv_heads, dim]"""
        self._kv = kv
        self._decoder["size"] = kv.shape[3]
        for layer, row in enumerate(self._layers):
            row["keys"], row["values"] = kv[layer, 0].data_ptr(), kv[layer, 1].data_ptr()

    def _find_adapters(self, lora: LoraBatch) -> np.ndarray | None:
        """[layers, 4, CALLS] of ADAPTERS; None where other code has a part in them."""
        found = [
            calls
            for layer, parts in enumerate(self._parts.layers)
            for one in parts.linears
            for calls in [self._find(lora, layer, one.targets)]
        ]
        known, table = self._adapters
        if len(known) == len(found) and all(map(operator.is_, known, found)):
            return table
        table = None
        if not any(len(calls) > CALLS or any(call.others for call in calls) for calls in found):
            table = _adapter_table([[call.segments for call in calls] for calls in found], found)
        self._adapters = found, table
        return table

    def _narrow_adapters(self, rows: np.ndarray, linears: int = 0) -> _Narrowed:
        """For `rows` [L], ascending, among themselves; of so many linears, the last ones, or 0: of all."""
        found = self._adapters[0][-linears:]
        segments = [[_narrow(call.segments, rows) for call in calls] for calls in found]
        return _Narrowed(_adapter_table(segments, found), segments)


@dataclass(frozen=True)
class _Narrowed:
    """table: [linears, CALLS] of ADAPTERS, which points to the arrays of `segments`."""

    table: np.ndarray
    segments: list[list[np.ndarray]]


def _adapter_table(segments: list[list[np.ndarray]], found: Sequence[Sequence[Adapters]]) -> np.ndarray:
    """[linears, CALLS] of ADAPTERS: those of `found`, with other segments."""
    table = np.zeros((len(found), CALLS), ADAPTERS)
    for row, parts, calls in zip(table, segments, found, strict=True):
        for place, part, call in zip(row, parts, calls, strict=False):
            if len(part):
                place["segments"], place["count"] = part.ctypes.data, len(part)
                place["parts"], place["rows"] = call.most_parts, call.most_rows
    return table


def _narrow(segments: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[S, 4] of start, stop and what belongs to them, the rows being counted among `rows`; none is empty."""
    few = segments.copy()
    few[:, :2] = np.searchsorted(rows, segments[:, :2])
    return few[few[:, 0] < few[:, 1]]


def _slices(rows: int) -> list[slice]:
    """Of at most MOST_ROWS, alike in size. One passes through all layers before the next, which reads its
    keys and values; so what is between layers stays in the caches."""
    count = max(1, -(-rows // MOST_ROWS))
    borders = [rows * i // count for i in range(count + 1)]
    return [slice(*pair) for pair in pairwise(borders)]


def _one_by_one(batch: AttentionBatch) -> tuple[Tensor, np.ndarray] | None:
    """The blocks [T, columns] and number of tokens [T] that each row sees; None where a prompt is long."""
    ends = np.array(batch.kv_lens, np.int64)
    if batch.query_starts[-1] == len(ends):
        return batch.block_table.contiguous(), ends
    counts = np.diff(np.asarray(batch.query_starts))
    if (ends[counts > 1] > SHORT).any():
        return None
    stops = np.repeat(np.cumsum(counts), counts)
    sequences = np.repeat(np.arange(len(ends)), counts)
    seen = ends[sequences] - stops + np.arange(1, len(stops) + 1)
    return batch.block_table[torch.from_numpy(sequences)].contiguous(), seen


def _panels(one: LinearParts) -> Panels:
    assert isinstance(one.weight, Panels)
    return one.weight


def _weight(one: LinearParts) -> tuple[int, ...]:
    """As WEIGHT."""
    weight = _panels(one)
    pointers = (address(part) or 0 for part in (weight.values, weight.scales, weight.offsets, one.bias))
    return (*pointers, weight.kind, weight.columns, weight.rows, weight.group_size)
