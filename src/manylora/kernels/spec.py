"""The batch tables that the operations of `reference.py` read.

T: token rows of the batch, packed over all sequences (prefill chunks and decode tokens together).

Extras are trained weights of an adapter other than low-rank matrices: biases, norms, embedding, head. They
are views of the page pool, used with plain PyTorch on any device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.panels import Panels
from manylora.kernels.quantised import PackedInt4, QuantisedWeight, StackedWeight
from manylora.kernels.row_format import RowFormat


@dataclass(frozen=True, eq=False)
class Extra:
    """A matrix [R, C] of one adapter (a vector has C = 1), stored in pieces of the pool.

    pool: flat. pieces: views of it, [rows, C] each; all but the last have `step` rows.
    starts: [pieces] int64 on the device, the offset of each piece in the pool.
    token_ids: [R] int64 on the device, ascending; the token of each row, if only rows of some tokens are
        trained.
    """

    pool: Tensor
    pieces: tuple[Tensor, ...]
    starts: Tensor
    token_ids: Tensor | None = None

    @property
    def step(self) -> int:
        return self.pieces[0].shape[0]

    @property
    def columns(self) -> int:
        return self.pieces[0].shape[1]

    def vector(self, dtype: torch.dtype) -> Tensor:
        """All values, flat, [R * C]."""
        parts = [piece.reshape(-1) for piece in self.pieces]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)

    def linear(self, x: Tensor) -> Tensor:
        """x [T, C] times the transposed matrix, [T, R]."""
        return torch.cat([F.linear(x, piece.to(x.dtype)) for piece in self.pieces], dim=1)

    def gather(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows by index, [T] int64 -> [T, C]. Does not wait for the device."""
        if len(self.pieces) == 1:
            return F.embedding(rows, self.pieces[0]).to(dtype)
        columns = torch.arange(self.columns, device=rows.device)
        piece = torch.div(rows, self.step, rounding_mode="floor")
        first = self.starts[piece] + (rows - piece * self.step) * len(columns)
        return self.pool[first.unsqueeze(1) + columns].to(dtype)


@dataclass(frozen=True)
class ExtraSegment:
    """Token rows [start, stop) of the batch use an adapter with these extras, by name.

    virtual: its rows that are virtual tokens: the row and the token's number, [V] int64 each. logits: which
    of the rows that need logits are in this segment, see `with_logits`.
    """

    start: int
    stop: int
    values: Mapping[str, Extra]
    logits: slice = field(default_factory=lambda: slice(0))
    virtual: tuple[Tensor, Tensor] | None = None


def with_logits(extras: Sequence[ExtraSegment], rows: Sequence[int]) -> tuple[ExtraSegment, ...]:
    """rows: rows that need logits, ascending, known on the host, so that no layer waits for the device."""
    return tuple(
        replace(one, logits=slice(bisect_left(rows, one.start), bisect_left(rows, one.stop)))
        for one in extras
    )


FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
NOT_FINITE = -1
"""Replaces a token if the row's logits contain a NaN or an infinity."""
Weight = Tensor | QuantisedWeight | PackedInt4 | StackedWeight | Panels
"""A weight [N, K] of a linear layer, plain or packed."""
Rotary = tuple[Tensor, Tensor]
"""cos and sin [T, R], contiguous, for the R rotated elements of a head."""


@dataclass(frozen=True)
class LoraRow:
    """Location of one (layer, module) of an adapter in the flat pool. Filled by `adapters.cache.pool`.

    pool[offset:] has A [rank, in_dim], then B transposed [rank, out_dim], then, with DoRA, the magnitude
    [out_dim]; all row-major and adjacent. A routed-expert module has these of each expert in turn.
    offset: in numbers of the format's encoding.
    more: if several adapters act together, the rows of the others, added in order. These have no `more`
    themselves, and all are mixed.
    vectors: for a shared row, whose offset other rows may also have: pool[vectors:] has b [out_dim], then d
    [rank]. -1: no vectors.
    """

    offset: int
    format: RowFormat
    more: tuple[LoraRow, ...] = ()
    vectors: int = -1

    @property
    def members(self) -> tuple[LoraRow, ...]:
        """This row and the rows added after it."""
        return (self, *self.more)

    @property
    def weighs_base(self) -> bool:
        """Whether it is a mix in which DoRA changes what the base gives."""
        return self.format.mixed and any(one.format.dora for one in self.members)

    def of_expert(self, expert: int, in_dim: int, out_dim: int) -> LoraRow:
        """The same with the matrices of that expert, of these dimensions."""
        more = tuple(row.of_expert(expert, in_dim, out_dim) for row in self.more)
        size = sum(self.format.sizes(in_dim, out_dim))
        return replace(self, offset=self.offset + expert * size, more=more)


@dataclass(frozen=True)
class LoraSegment:
    """Token rows [start, stop) of the batch use one adapter."""

    start: int
    stop: int
    rows: Mapping[tuple[int, int], LoraRow]  # (layer, module id) -> location; absent: no delta


@dataclass(frozen=True)
class LoraBatch:
    """All adapters of one forward pass. Rows outside all segments belong to the base model.

    pool: flat, [elements], on the device; in the compute dtype, or on a CPU in bfloat16 under float32. Rows
          with another encoding are stored in it as bytes.
    segments: ascending and disjoint, at most one per sequence. If adapters act on all rows of their
              sequences, one per adapter: the runner orders rows accordingly. Over pairs of experts, one per
              group.
    alignment: in elements; every row's offset is a multiple of it.
    extras: of the adapters that have any, as for `segments`. Operations do not read them; layers do.
    """

    pool: Tensor
    segments: tuple[LoraSegment, ...]
    alignment: int = 1
    extras: tuple[ExtraSegment, ...] = ()

    def among(self, rows: Sequence[int]) -> LoraBatch | None:
        """The batch restricted to these rows, ascending, with positions counted within them. Without extras.
        None: the plan only works for all rows.
        """
        few = [
            LoraSegment(start, stop, one.rows)
            for one in self.segments
            for start, stop in [(bisect_left(rows, one.start), bisect_left(rows, one.stop))]
            if start < stop
        ]
        return replace(self, segments=tuple(few), extras=())


@dataclass(frozen=True)
class LoraTarget:
    """A LoRA module id and the output columns [start, start + width) of the linear layer it adds to."""

    module_id: int
    start: int
    width: int


Targets = Sequence[LoraTarget]
"""The LoRA modules of one linear layer."""


@dataclass(frozen=True)
class AttentionBatch:
    """Maps the T packed query rows to sequences and their pages. Filled by the runner.

    query_starts: S + 1 host ints; rows query_starts[s]:query_starts[s+1] belong to sequence s.
    kv_lens:      S host ints; tokens of s in the cache including this step's.
    block_table:  [S, max_blocks] int32 on the device; entries past a sequence's last block are 0.
    slots:        [T] int64 on the device; block * tokens_per_block + offset where each row's k and v go.
                  -1, in batches of `plan(fixed=True)` only: a padding row, nothing is stored.
    """

    query_starts: Sequence[int]
    kv_lens: Sequence[int] | np.ndarray
    block_table: Tensor
    slots: Tensor


@dataclass(frozen=True)
class AttentionParams:
    """Of one layer: scale of scores, sliding window in tokens, and soft cap of scores.

    sinks: [Hq] float32, contiguous, on the device: an additional score per query head, which takes part in
    the softmax but has no value; None: none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ExpertPairs:
    """P pairs of a token row and one of its experts, sorted by expert, then by row. Filled by `pair_up`.

    rows: [P] int64 on the device: the token row of each pair. Devices store the expert of each pair in
    subtypes.
    """

    rows: Tensor


@dataclass(frozen=True)
class BatchLimits:
    """Upper limits for all batches of an engine, and its attention shapes. Sizes in elements.

    kv_dtype: of the KV cache; None: `dtype`. softcap: of attention scores. sinks: whether heads have
    attention sinks.
    num_experts: 0 for none. chunk_tokens: prompts are split only at multiples of it. other_heads:
    (num_kv_heads, head_dim) of layers that differ.
    """

    num_layers: int
    max_sequences: int
    max_seq_len: int
    tokens_per_block: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    windows: frozenset[int | None] = frozenset({None})
    softcap: float | None = None
    kv_dtype: torch.dtype | None = None
    sinks: bool = False
    num_experts: int = 0
    chunk_tokens: int = 512
    other_heads: frozenset[tuple[int, int]] = frozenset()

    @property
    def head_shapes(self) -> list[tuple[int, int]]:
        """(num_kv_heads, head_dim) of all layers, without duplicates."""
        return sorted({(self.num_kv_heads, self.head_dim), *self.other_heads})
