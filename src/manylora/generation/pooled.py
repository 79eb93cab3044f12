"""Prompts for which hidden states or labels are computed: their state, and embeddings, labels and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manylora.config.pooling import PoolingSettings
from manylora.errors import RequestError
from manylora.request import Event, LoraInput, LoraMix, Pooling, Request, RequestMetrics


@dataclass(frozen=True)
class PoolingParams:
    """dimensions: cut embeddings to this length. use_activation: normalise them, make probabilities."""

    dimensions: int | None = None
    use_activation: bool = True
    truncate_prompt_tokens: int | None = None  # use only the last N tokens
    add_special_tokens: bool = True


class PooledGeneration:
    """As `Generation`. values: float32, [n] or [tokens, n]; None until computed."""

    num_sequences, num_output = 1, 0

    def __init__(
        self, prompt: tuple[int, ...], pooling: Pooling, request_id: str = "", cache_salt: str = ""
    ) -> None:
        self.prompt, self.pooling = prompt, pooling
        self.request_id, self._cache_salt = request_id, cache_salt
        self.error: Exception | None = None
        self.ended = False
        self.values: np.ndarray | None = None
        self.metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or self.values is not None

    @property
    def complete(self) -> bool:
        return self.values is not None

    def request(self, lora: LoraInput | LoraMix | None) -> Request:
        return Request(
            self.prompt,
            lora=lora,
            pooling=self.pooling,
            request_id=self.request_id,
            cache_salt=self._cache_salt,
        )

    def take(self, event: Event) -> None:
        self.ended = self.ended or event.last
        if self.finished:
            return
        self.values, self.error, self.metrics = event.pooled, event.error, event.metrics
        if event.last and not self.finished:
            self.error = RequestError("The engine gave no pooled output")

    def fail(self, error: Exception) -> None:
        self.ended = True
        if not self.finished:
            self.error = error


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
    """logits [..., labels] to probabilities: softmax; sigmoid for one label or multi_label_classification;
    unchanged for regression. problem_type is for heads with the base model's labels.
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


def pooling_of(task: str, settings: PoolingSettings) -> Pooling:
    """task: one of TASKS."""
    if task.startswith("token_"):
        return Pooling("all", head=task == "token_classify")
    return Pooling(settings.head_mode, head=True) if task == "classify" else Pooling(settings.mode)


def pair_up(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Raises ValueError for lists of different lengths."""
    first, second = ([one] if isinstance(one, str) else list(one) for one in (text_1, text_2))
    if len(first) == 1:
        first *= len(second)
    if not first or len(first) != len(second):
        raise ValueError(
            f"text_1 must be one text, or one for each text_2: got {len(first)} and {len(second)}"
        )
    return list(zip(first, second, strict=True))


def pair_score(logits: np.ndarray, settings: PoolingSettings, params: PoolingParams) -> float:
    """The score of a cross-encoder. Raises ValueError for a head with several labels."""
    if logits.shape[-1] != 1:
        raise ValueError(
            f"a score needs a head of one label, this one has {logits.shape[-1]}: ask for labels"
        )
    return float(probabilities(logits, settings, params.use_activation)[0])
