"""The operations a device must provide, and the batch tables they read.

Each op is described by a *Semantics* line in plain PyTorch and the shapes of its arguments.
`reference.py` implements them in exactly that way and is what every faster version is tested against.

T: token rows of the batch, packed over all sequences (prefill chunks and decode tokens together).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from manylora.kernels.extras import ExtraSegment
from manylora.kernels.panels import Panels, WeightRows
from manylora.kernels.quantised import PackedInt4, QuantisedWeight, StackedWeight
from manylora.kernels.row_format import RowFormat

Weight = Tensor | QuantisedWeight | PackedInt4 | StackedWeight | Panels
"""A weight [N, K] of a linear layer, as it is or packed."""
Rotary = tuple[Tensor, Tensor]
"""cos and sin [T, R], contiguous, of the R elements of a head that are rotated."""


@dataclass(frozen=True)
class LoraRow:
    """Where one (layer, module) of one adapter lies in the flat pool. Filled by `lora.pool`.

    pool[offset:] holds A [rank, in_dim], then B transposed [rank, out_dim], then, with DoRA, the magnitude
    [out_dim]; all row-major and adjacent. Of a routed-expert module there is one such pair for each expert,
    one after the other, each rank * (in_dim + out_dim) numbers. offset: in numbers of the format's encoding.
    """

    offset: int
    format: RowFormat


@dataclass(frozen=True)
class LoraSegment:
    """Token rows [start, stop) of the batch run under one adapter."""

    start: int
    stop: int
    rows: Mapping[tuple[int, int], LoraRow]  # (layer, module id) -> place; absent: no delta there


@dataclass(frozen=True)
class LoraBatch:
    """All adapters of one forward pass. Rows outside every segment belong to the base model.

    pool: flat, [elements], on the device; in the compute dtype, or on a CPU in bfloat16 under float32. Rows
          of another encoding lie in it as bytes.
    segments: ascending, disjoint, at most one for each adapter (the runner orders sequences by adapter); over
              the pairs of experts, one for each of their groups.
    alignment: elements; every offset of every row is a multiple of it.
    extras: of the adapters that have any, as `segments`. No operation of `Ops` reads them: the layers do.
    """

    pool: Tensor
    segments: tuple[LoraSegment, ...]
    alignment: int = 1
    extras: tuple[ExtraSegment, ...] = ()


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
    """How the T packed query rows map to sequences and their pages. Filled by the runner.

    query_starts: S + 1 host ints; rows query_starts[s]:query_starts[s+1] belong to sequence s.
    kv_lens:      S host ints; tokens of s in the cache including this step's.
    block_table:  [S, max_blocks] int32 on the device; entries past a sequence's last block are 0.
    slots:        [T] int64 on the device; block * tokens_per_block + offset where each row's k and v go.
                  -1, in batches of `plan(fixed=True)` only: a padding row, nothing is stored.
    """

    query_starts: Sequence[int]
    kv_lens: Sequence[int]
    block_table: Tensor
    slots: Tensor


@dataclass(frozen=True)
class AttentionParams:
    """Of one layer: the scale of scores, the sliding window in tokens, and the soft cap of scores."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class ExpertPairs:
    """P pairs of a token row and one of its experts, sorted by expert, then by row. Filled by `Ops.pair_up`.

    rows: [P] int64 on the device; the token row of each pair. What says whose expert a pair is, a device
    keeps in a subtype of its own.
    """

    rows: Tensor


@dataclass(frozen=True)
class BatchLimits:
    """What no batch of one engine exceeds, and the shapes its attention has. Sizes in elements.

    kv_dtype: of the KV cache, None: as `dtype`. softcap: of its attention scores. num_experts: 0 for none.
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
    num_experts: int = 0


class Ops(Protocol):
    """The table of operations of one device.

    Plan once for a step, on the host; run once for a layer, on the device. `plan` comes before the layers and
    may return a subtype of its arguments that carries more tables; only that goes to the other operations.
    """

    def reserve(self, limits: BatchLimits, device: torch.device) -> None:
        """Allocate what lives as long as the engine, and choose between implementations. Once, first."""
        ...

    def plan(
        self, attention: AttentionBatch, lora: LoraBatch | None, fixed: bool = False
    ) -> tuple[AttentionBatch, LoraBatch | None]:
        """Complete a batch whose tables are still on the host.

        fixed: every sequence has one query row, and the shapes of all tables depend on the number of rows
        and the width of the block table alone, so that a recorded graph can run again on other contents.
        """
        ...

    def trials(self) -> AbstractContextManager[bool]:
        """Inside, operations may run variants of themselves and keep the fastest; gives whether any does.

        What they compute there is of no use otherwise. Outside they never do.
        """
        ...

    has_bfloat16: bool
    """Whether the processor multiplies bfloat16 itself."""

    def keeps(self, stored: torch.dtype, compute: torch.dtype) -> bool:
        """Whether `linear` reads a weight as it is stored, though it computes in `compute`."""
        ...

    def pack(self, weight: Tensor | QuantisedWeight | StackedWeight, routed: bool = False) -> Weight:
        """A weight [N, K] in the form that this device's `linear` likes best, or when routed `expert_linear`;
        the original may be let go."""
        ...

    def pack_rows(self, rows: WeightRows, routed: bool = False) -> Weight:
        """As `pack`, of a plain weight that is still in its file."""
        ...

    def linear(self, x: Tensor, packed: Weight, bias: Tensor | None) -> Tensor:
        """Semantics: x @ weight.T + bias, of a packed weight; x [T, K] -> [T, N]."""
        ...

    def lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, layer: int, targets: Targets, bias: Tensor | None = None
    ) -> None:
        """Add every adapter's delta to its own rows of y, in place.

        Semantics, for each segment and target with a row (A, B[, m]) and columns c:
            y[rows, c] += (scale * (x[rows] @ A.T)) @ B.T
            y[rows, c] = m * (y[rows, c] - bias[c]) + bias[c]        (only with a DoRA magnitude m)
        y [T, N], x [T, in_dim], bias [N] or None (already part of y).
        """
        ...

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        """Rotated queries; rotated keys, and values, into their pages.

        Semantics, with rotary = (cos, sin) and R = cos.shape[1], for x of q and k:
            x[..., :R] = x[..., :R] * cos + cat(-x2, x1) * sin, x1 and x2 the halves of x[..., :R]
            k_cache.view(-1, H, D)[slots] = k; the same for v
        q [T, Hq, D], k, v [T, H, D], last dimension contiguous; caches [blocks, tokens_per_block, H, D], one
        layer's; of k's dtype or float8_e4m3fn, to which values are clamped and rounded -> [T, Hq, D].
        """
        ...

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, params: AttentionParams
    ) -> Tensor:
        """Causal attention of each row over its own sequence's pages.

        Semantics, for query i (absolute position p) of sequence s, over keys j of s:
            softmax_j(scale * q_i . k_j) v_j  with  j <= p  and, with a window w,  j > p - w
            and, with a softcap c, c * tanh(scale * q_i . k_j / c) in place of scale * q_i . k_j
        q [T, Hq, D], caches [blocks, tokens_per_block, Hkv, D], Hq a multiple of Hkv -> [T, Hq, D].
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Semantics: with n = x.float() * rsqrt(mean(x.float() ** 2, -1) + eps),
            (weight * n.to(weight.dtype)).to(x.dtype)

        weight [N] in the dtype of x, or in float32 where the model needs it exact.
        """
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Semantics: x + delta, and rms_norm(x + delta, weight, eps). x, delta [T, N]."""
        ...

    def gated(self, y: Tensor, activation: str) -> Tensor:
        """Semantics: with up, gate = y.chunk(2, -1):  f(gate) * up, f = ACTIVATIONS[activation]

        y [T, 2N], last dimension contiguous -> [T, N].
        """
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Semantics: (x - mean(x, -1)) * rsqrt(var(x, -1) + eps) * weight + bias, in float32, to x.dtype."""
        ...

    def pair_up(
        self, choices: Tensor, num_experts: int, lora: LoraBatch | None
    ) -> tuple[ExpertPairs, Tensor]:
        """The pairs of one layer, and where each choice [T * k] is among them (int64), to undo the order.

        choices [T, k] int64: the experts of each row.
        """
        ...

    def expert_linear(self, x: Tensor, pairs: ExpertPairs, weights: Sequence[Weight]) -> Tensor:
        """Each pair's row times its expert's weight.

        Semantics, for each expert e and its pairs p: y[p] = x[p] @ weights[e].T
        x [P, K], weights: E packed ones of [N, K] -> [P, N].
        """
        ...

    def expert_lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, pairs: ExpertPairs, layer: int, targets: Targets
    ) -> None:
        """Add to each pair the delta of its row's adapter for its expert, in place.

        Semantics, for each expert e and segment, their pairs p, and each target of the segment's adapter with
        a row (A, B) and columns c:
            y[p, c] += (scale * (x[p] @ A[e].T)) @ B[e].T
        y [P, N], x [P, in_dim].
        """
        ...
