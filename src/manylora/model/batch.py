"""ForwardBatch: the input of a forward pass, made by the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from manylora.kernels.recurrent import StateBatch
from manylora.kernels.spec import AttentionBatch, LoraBatch


@dataclass
class HiddenRows:
    """rows [P] int64, ascending, whose hidden states behind the final norm are wanted. hidden [P, hidden]:
    written by the forward pass."""

    rows: Tensor
    hidden: Tensor | None = None


@dataclass
class Best:
    """tokens [L] int64: what `best_tokens` says of the logits, where the forward pass finds it on its way."""

    tokens: Tensor | None = None


@dataclass(frozen=True)
class ForwardBatch:
    """T token rows, packed over all sequences.

    input_ids, positions: [T] int64.
    logits_rows: [L] int64, ascending, the rows whose logits are computed.
    rope_lengths: [T] int64, the length by which `dynamic` and `longrope` rotate a row; None: positions + 1.
    embeddings: rows [E] int64 and vectors [E, hidden] that replace the embeddings of their tokens.
    cross: encoder-decoder models only: the pages and numbers of each sequence's cross-attention keys; its
           slots are empty.
    state: where the states of recurrent layers are; None: each sequence begins, and nothing is kept of it.
    token_types: [T] int64; None: all are 0.
    pooled: None where no hidden states are wanted.
    best: written by the forward pass.
    lora: None when no row has an adapter; then no LoRA kernel runs.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    lora: LoraBatch | None
    logits_rows: Tensor
    embeddings: tuple[Tensor, Tensor] | None = None
    cross: AttentionBatch | None = None
    rope_lengths: Tensor | None = None
    state: StateBatch | None = None
    pooled: HiddenRows | None = None
    token_types: Tensor | None = None
    best: Best = field(default_factory=Best)
