"""ForwardBatch: the input of one forward pass. Filled by the runner."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manylora.kernels.spec import AttentionBatch, LoraBatch

__all__ = ["ForwardBatch"]


@dataclass(frozen=True)
class ForwardBatch:
    """T token rows, packed over all sequences.

    input_ids, positions: [T] int64.
    logits_rows: [L] int64, the rows whose logits are wanted.
    embeddings: rows [E] int64 and vectors [E, hidden]: rows that are no tokens of the vocabulary.
    cross: of an encoder-decoder model: where the keys and values lie that the encoder gave each sequence, and
           how many there are; its slots are empty.
    lora: None when no row has an adapter; then not one LoRA instruction runs.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    lora: LoraBatch | None
    logits_rows: Tensor
    embeddings: tuple[Tensor, Tensor] | None = None
    cross: AttentionBatch | None = None
