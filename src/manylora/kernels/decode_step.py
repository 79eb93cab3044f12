"""DecodeStep: a decoder's step as one call of compiled code, for rows whose attention is computed one by one.

These are decoded tokens and short prompts.

Calling the operations of a small model from Python takes as long as running them. This calls the same
operations in the same order from C, so a row's result is exactly that of `Decoder.forward`.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manylora.kernels.adapter_calls import AdapterCall, AdapterCalls
from manylora.kernels.panels import FORMS, Panels, address
from manylora.kernels.quantised import StackedWeight
from manylora.kernels.spec import AttentionBatch, AttentionParams, LoraBatch, LoraTarget, Weight

# Prompts up to this length are computed row by row, which is no slower than torch's attention with its call
# overhead.
SHORT = 256
MOST_ROWS = 1024  # rows that pass through the layers together
MOST_SCORES = 2**26  # rows * heads * tokens of the longest sequence
LINEARS = 4  # linear layers per decoder layer
PARTS = 3  # of a linear layer whose parts are stored in different formats
CALLS = 2  # adapter calls per linear layer: for a fused projection, then for its parts
NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm")
SIZES = (
    "layers", "hidden", "heads", "kv_heads", "dim", "size", "inner", "widest", "activation", "cache_kind",
    "norm_heads", "pairs", "most_scores",
)  # fmt: skip
# Fields that are those of DecoderParts.
OF_DECODER = (
    "hidden", "heads", "kv_heads", "dim", "inner", "activation", "norm_heads", "pairs", "eps",
    "embedding_scale",
)  # fmt: skip


def _structure(*fields: str | tuple[Any, ...]) -> np.dtype:
    """A struct of native/decoder.c. A plain name is a pointer or an int64."""
    named = [(field, "i8") if isinstance(field, str) else field for field in fields]
    return np.dtype(named, align=True)


WEIGHT = _structure("w", "scale", "offset", "bias", "kind", "in", "out", "group", "scales")
LAYER = _structure(
    *(*NORMS, ("linear", WEIGHT, (LINEARS, PARTS)), "keys", "values", "window", "rotary"),
    *(("scale", "f4"), ("cap", "f4")),
)
DECODER = _structure(
    *("layer", *SIZES, "norm", ("head", WEIGHT, PARTS), ("table", WEIGHT), "table_width"),
    *(("eps", "f4"), ("embedding_scale", "f4")),
)
STEP = _structure(
    *("ids", "x", "logits", "best", ("cos", "i8", 2), ("sin", "i8", 2), ("places", "i8", 2), "slots"),
    *("lengths", "wanted", "table", "adapters", "last", "pool", "pool_kind", "rows", ("turns", "i8", 2)),
    *("turned", "columns", "wanted_rows"),
)
ADAPTERS = _structure("segments", "count", "parts", "rows")
KINDS = (torch.float32, torch.bfloat16)  # in the order of their numbers in native/vectors.h


@dataclass(frozen=True)
class LinearParts:
    """weight: packed. targets: of its adapters."""

    weight: Weight
    bias: Tensor | None
    targets: tuple[LoraTarget, ...] = ()

    @property
    def panels(self) -> tuple[Panels, ...]:
        """The parts of the weight. Empty if they are more than the compiled step takes, or not all panels."""
        parts = self.weight.parts if isinstance(self.weight, StackedWeight) else (self.weight,)
        found = tuple(part for part in parts if isinstance(part, Panels))
        return found if len(found) == len(parts) <= PARTS else ()

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.panels)


@dataclass(frozen=True)
class LayerParts:
    """norms: in the order of NORMS, None where there is none. linears: qkv, out, up and gate, down. rotary:
    index among the step's; -1: none.
    """

    norms: dict[str, Tensor | None]
    linears: tuple[LinearParts, LinearParts, LinearParts, LinearParts]
    params: AttentionParams
    rotary: int


@dataclass(frozen=True)
class DecoderParts:
    """A decoder whose layers have RMS norms, attention and a gated MLP, each added to the residual stream.

    embedding: [vocab, hidden], contiguous, from which a step can compute x itself, with scaling; None: it
    cannot.
    norm_heads: q and k are normalised per head. pairs: neighbours are rotated together. activation: its
    number in native/elementwise.c. eps: of all norms.
    """

    embedding: Tensor | Panels | None
    embedding_scale: float
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
        """Whether the compiled step supports it: weights are panels, everything else is float32."""
        others = [norm for layer in self.layers for norm in layer.norms.values()]
        others += [self.norm, *(one.bias for one in (self.head, *self.linears()))]
        plain = all(one is None or (one.dtype == torch.float32 and one.is_contiguous()) for one in others)
        return plain and all(one.panels for one in (self.head, *self.linears()))


@dataclass(frozen=True)
class PlacedRotary:
    """Cosines and sines [turns, R], contiguous, for rotating rows. places [T] int64: index of each row's
    entry; None: in the order of the rows.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor | None


class DecodeStep:
    """parts: must be plain. rounds_adapters: whether bfloat16 adapters round their inputs to bfloat16."""

    def __init__(
        self, library: ctypes.CDLL, parts: DecoderParts, calls: AdapterCalls, rounds_adapters: bool = False
    ) -> None:
        self._library, self._parts, self._calls = library, parts, calls
        self._rounds_adapters = rounds_adapters
        self._memory = torch.empty(1)
        self._kv: Tensor | None = None
        self._last: _Steps | None = None  # if they can be run again
        self._adapters: tuple[list[Any], np.ndarray | None] = ([], None)
        self._layers = np.zeros(len(parts.layers), LAYER)
        for row, layer in zip(self._layers, parts.layers, strict=True):
            for name, norm in layer.norms.items():
                row[name] = address(norm) or 0
            row["linear"] = [_weights(one) for one in layer.linears]
            row["rotary"] = layer.rotary
            row["window"] = -1 if layer.params.window is None else layer.params.window
            row["scale"], row["cap"] = layer.params.scale, layer.params.softcap or 0
        self._decoder = np.zeros(1, DECODER)
        self._decoder_at = self._decoder.ctypes.data
        self._decoder["layer"] = self._layers.ctypes.data
        for name in OF_DECODER:
            self._decoder[name] = getattr(parts, name)
        self._decoder["layers"], self._decoder["most_scores"] = len(parts.layers), MOST_SCORES
        self._decoder["widest"] = max(max(one.rows, one.panels[0].columns) for one in parts.linears())
        self._decoder["norm"], self._decoder["head"] = parts.norm.data_ptr(), _weights(parts.head)
        if (table := parts.embedding) is not None:
            rows = table if isinstance(table, Panels) else Panels(table, None, None, *table.shape)
            self._decoder["table"] = _weight(rows, None)
            self._decoder["table_width"] = library.panel_width() if isinstance(table, Panels) else 1

    @property
    def embeds(self) -> bool:
        """Whether it computes x from tokens."""
        return self._parts.embedding is not None

    def __call__(
        self,
        x: Tensor,
        rotary: list[PlacedRotary],
        batch: AttentionBatch,
        lora: LoraBatch | None,
        kv: Tensor,
        logits_rows: Tensor,
    ) -> tuple[Tensor, Tensor] | None:
        """Logits [L, vocab] float32, and for each row the result of `best_tokens`. None if other code must do
        a part of it.

        x [T, hidden] float32, is overwritten; or, if it `embeds`, tokens [T] int64. logits_rows [L],
        ascending. The rest as for `Decoder.forward`.
        """
        self._last = None
        plain = x.dtype in (torch.int64, torch.float32) and kv.dtype in KINDS and x.is_contiguous()
        if not plain or (lora is not None and lora.extras):
            return None
        tables = _one_by_one(batch)
        adapters = None if lora is None else self._find_adapters(lora)
        if tables is None or (lora is not None and (adapters is None or lora.pool.dtype not in KINDS)):
            return None
        if kv is not self._kv:
            self._place(kv)
        table, ends = tables
        slices, embeds = _slices(len(x)), x.dtype == torch.int64
        logits = torch.empty(len(logits_rows), self._parts.head.rows)
        best = torch.empty(len(logits_rows), dtype=torch.int64)
        borders = np.searchsorted(logits_rows.numpy(), [rows.stop for rows in slices])
        steps, held = list[np.ndarray](), list[Any]([x, rotary, batch, lora, table, ends, adapters])
        for rows, first, last in zip(slices, [0, *borders], borders, strict=False):
            wanted = logits_rows[first:last]
            step = self._step_of(rows, x, rotary, table, ends, batch.slots)
            among = wanted - rows.start
            step["logits"], step["best"] = logits[first:last].data_ptr(), best[first:last].data_ptr()
            step["wanted"], step["wanted_rows"] = among.data_ptr(), len(among)
            held.append(among)
            if lora is not None and adapters is not None:
                used = adapters
                if len(slices) > 1:
                    these = self._narrow_adapters(np.arange(rows.start, rows.stop))
                    used = these.table
                    held.append(these)
                step["adapters"], step["pool"] = used.ctypes.data, lora.pool.data_ptr()
                rounds = self._rounds_adapters and lora.pool.dtype == torch.bfloat16
                step["pool_kind"] = KINDS.index(lora.pool.dtype) + (FORMS if rounds else 0)
                if len(wanted) < rows.stop - rows.start:
                    narrowed = self._narrow_adapters(wanted.numpy(), LINEARS)
                    step["last"] = narrowed.table.ctypes.data
                    held.append(narrowed)
            steps.append(step)
        made = _Steps(steps, [step.ctypes.data for step in steps], logits, best, held)
        decodes = batch.query_starts[-1] == len(batch.kv_lens)
        if decodes and embeds and all(one.places is not None for one in rotary):
            self._last = made
        return self._run(made)

    def forget(self) -> None:
        """Hold no tensors of earlier calls any more."""
        self._kv = self._last = None
        self._adapters = ([], None)

    def again(self) -> tuple[Tensor, Tensor] | None:
        """Repeat the last call with the current content of its arrays of tokens, places, slots, blocks and
        lengths.

        Overwrites the previous results. None: a normal call is needed.
        """
        return None if self._last is None else self._run(self._last)

    def _step_of(
        self,
        rows: slice,
        x: Tensor,
        rotary: list[PlacedRotary],
        table: Tensor,
        ends: np.ndarray,
        slots: Tensor,
    ) -> np.ndarray:
        """STEP for some rows, from tensors for all of them; without logits and adapters."""
        step = np.zeros((), STEP)
        step["ids" if x.dtype == torch.int64 else "x"] = x[rows].data_ptr()
        for number, one in enumerate(rotary):
            first = rows.start if one.places is None else 0
            step["cos"][number], step["sin"][number] = one.cos[first:].data_ptr(), one.sin[first:].data_ptr()
            if one.places is not None:
                step["places"][number], step["turns"][number] = one.places[rows].data_ptr(), len(one.cos)
            step["turned"] = one.cos.shape[1]
        step["slots"] = slots[rows].data_ptr()
        step["lengths"], step["table"] = ends[rows].ctypes.data, table[rows].data_ptr()
        step["columns"], step["rows"] = table.shape[1], rows.stop - rows.start
        return step

    def _run(self, steps: _Steps) -> tuple[Tensor, Tensor] | None:
        """None: it must be set up again, or done by other code."""
        run, decoder = self._library.decode_step, self._decoder_at
        for step in steps.places:
            missing = run(decoder, step, self._memory.data_ptr(), self._memory.numel())
            if missing > 0:
                self._memory = torch.empty(2 * missing)
                missing = run(decoder, step, self._memory.data_ptr(), self._memory.numel())
            if missing:
                self._last = None
                return None
        return steps.logits, steps.best

    def _place(self, kv: Tensor) -> None:
        """kv [layers, 2, blocks, size, kv_heads, dim]"""
        self._kv = kv
        self._decoder["size"], self._decoder["cache_kind"] = kv.shape[3], KINDS.index(kv.dtype)
        for layer, row in enumerate(self._layers):
            row["keys"], row["values"] = kv[layer, 0].data_ptr(), kv[layer, 1].data_ptr()

    def _find_adapters(self, lora: LoraBatch) -> np.ndarray | None:
        """[layers, 4, CALLS] of ADAPTERS. None if other code must compute a part of them."""
        found = [
            calls
            for layer, parts in enumerate(self._parts.layers)
            for one in parts.linears
            for calls in [self._calls.find(lora, layer, one.targets)]
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
        """For `rows` [L], ascending, with segments counted within them. linears: only the last ones; 0:
        all.
        """
        found = self._adapters[0][-linears:]
        segments = [[_narrow(call.segments, rows) for call in calls] for calls in found]
        return _Narrowed(_adapter_table(segments, found), segments)


@dataclass(frozen=True)
class _Steps:
    """Consecutive groups of rows. steps: of STEP, at `places`. held: the objects they point to."""

    steps: list[np.ndarray]
    places: list[int]
    logits: Tensor
    best: Tensor
    held: list[Any]


@dataclass(frozen=True)
class _Narrowed:
    """table: [linears, CALLS] of ADAPTERS, which points to the arrays of `segments`."""

    table: np.ndarray
    segments: list[list[np.ndarray]]


def _adapter_table(segments: list[list[np.ndarray]], found: Sequence[Sequence[AdapterCall]]) -> np.ndarray:
    """[linears, CALLS] of ADAPTERS: those of `found`, with other segments."""
    table = np.zeros((len(found), CALLS), ADAPTERS)
    for row, parts, calls in zip(table, segments, found, strict=True):
        for place, part, call in zip(row, parts, calls, strict=False):
            if len(part):
                place["segments"], place["count"] = part.ctypes.data, len(part)
                place["parts"], place["rows"] = call.most_parts, call.most_rows
    return table


def _narrow(segments: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[S, 4] of start, stop and associated values, with positions counted within `rows`. No empty
    segments.
    """
    few = segments.copy()
    few[:, :2] = np.searchsorted(rows, segments[:, :2])
    return few[few[:, 0] < few[:, 1]]


def _slices(rows: int) -> list[slice]:
    """Slices of at most MOST_ROWS rows, similar in size. A slice passes through all layers before the next
    one, which reads its keys and values, so that intermediate results stay in the CPU caches.
    """
    count = max(1, -(-rows // MOST_ROWS))
    borders = [rows * i // count for i in range(count + 1)]
    return [slice(*pair) for pair in pairwise(borders)]


def _one_by_one(batch: AttentionBatch) -> tuple[Tensor, np.ndarray] | None:
    """The blocks [T, columns] and number of tokens [T] visible to each row. None if a prompt is long."""
    ends = np.asarray(batch.kv_lens, np.int64)
    if batch.query_starts[-1] == len(ends):
        return batch.block_table.contiguous(), ends
    counts = np.diff(np.asarray(batch.query_starts))
    if (ends[counts > 1] > SHORT).any():
        return None
    stops = np.repeat(np.cumsum(counts), counts)
    sequences = np.repeat(np.arange(len(ends)), counts)
    seen = ends[sequences] - stops + np.arange(1, len(stops) + 1)
    return batch.block_table[torch.from_numpy(sequences)].contiguous(), seen


def _weights(one: LinearParts) -> list[tuple[int, ...]]:
    """As PARTS structs WEIGHT."""
    biases = [None] * PARTS if one.bias is None else one.bias.split([part.rows for part in one.panels])
    found = [_weight(part, bias) for part, bias in zip(one.panels, biases, strict=False)]
    return found + [(0,) * len(WEIGHT.names or ())] * (PARTS - len(found))


def _weight(weight: Panels, bias: Tensor | None) -> tuple[int, ...]:
    pointers = (address(part) or 0 for part in (weight.values, weight.scales, weight.offsets, bias))
    return (*pointers, weight.kind, weight.columns, weight.rows, weight.group_size, weight.stored_scales)
