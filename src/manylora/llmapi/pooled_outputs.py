"""Outputs of requests for embeddings, labels and scores, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from manylora.config.pooling import PoolingSettings
from manylora.llmapi.lora import LoRAChoice

Output = TypeVar("Output")


@dataclass(frozen=True)
class PoolingParams:
    """dimensions: cut embeddings to this length. use_activation: normalise embeddings as the model's folder
    says, and convert logits to probabilities.
    """

    dimensions: int | None = None
    use_activation: bool = True
    truncate_prompt_tokens: int | None = None  # use only the last N tokens
    add_special_tokens: bool = True


@dataclass(frozen=True)
class PoolingOutput:
    """data: [n], or [tokens, n] for all tokens; float32."""

    data: np.ndarray


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """probs: one per label; logits with use_activation False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Output]):
    """prompt_token_ids: after truncation; for two texts that are embedded, of both."""

    request_id: int
    outputs: Output
    prompt_token_ids: list[int]
    lora_request: LoRAChoice | None = None
    finished: bool = True


def embedding(values: np.ndarray, settings: PoolingSettings, params: PoolingParams) -> np.ndarray:
    """values [..., hidden]. Raises ValueError for dimensions that the model does not support."""
    if params.dimensions is not None:
        check_dimensions(params.dimensions, settings)
        values = values[..., : params.dimensions]
    if not (settings.normalise and params.use_activation):
        return values
    return values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12)


def check_dimensions(dimensions: int, settings: PoolingSettings) -> None:
    known = settings.dimensions
    if known is None:
        raise ValueError(
            "dimensions: config.json names no matryoshka_dimensions (or is_matryoshka), so that this model's "
            "embeddings cannot be cut"
        )
    if dimensions not in known:
        listed = ", ".join(map(str, known)) if len(known) < 20 else f"from 1 to {known[-1]}"
        raise ValueError(f"dimensions must be one of {listed}, got {dimensions}")


def probabilities(logits: np.ndarray, settings: PoolingSettings, activate: bool = True) -> np.ndarray:
    """logits [..., labels] to probabilities, with softmax.

    With sigmoid for one label, and if problem_type in config.json is multi_label_classification. Unchanged if
    it is regression. problem_type applies only to heads with as many labels as the base model's.
    """
    count = logits.shape[-1]
    problem = settings.problem if len(settings.labels or (0, 0)) == count else ""
    if not activate or problem == "regression":
        return logits
    if count == 1 or problem == "multi_label_classification":
        return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))), np.float32)
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two embeddings."""
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))
