"""CompletionOutput: one output of a prompt, with log probabilities of its tokens. What is returned for a
prompt that was pooled: vectors, probabilities and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from manylora.config.pooling import PoolingSettings
from manylora.errors import RequestError
from manylora.request import Event, LoraInput, LoraMix, Pooling, Request, RequestMetrics


@dataclass(frozen=True)
class Logprob:
    """Natural log, after penalties and temperature. rank 1: the most probable token."""

    logprob: float
    rank: int | None = None


@dataclass(frozen=True)
class LoraVersion:
    """Which version of an adapter, counted from 1, generated the tokens [start, end)."""

    name: str
    version: int
    digest: str
    start: int
    end: int


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a prompt so far.

    token_ids: without the end token, and without a stop token unless include_stop_str_in_output. text_diff,
    token_ids_diff: new since the previous RequestOutput. cumulative_logprob: None unless computed; for a beam
    it includes the end token. logprobs: per token, a mapping from its id; None unless requested.
    finish_reason: None while running; then "stop", "length" or "cancelled". stop_reason: the text or id of
    `stop` or `stop_token_ids` that ended it. generation_logits: [length, vocabulary] float32, if finished and
    requested. lora_versions: versions of its adapter, covering all tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)
    generation_logits: np.ndarray | None = field(default=None, compare=False)
    lora_versions: tuple[LoraVersion, ...] = ()

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class TokenLogprob:
    """logprob: None for a prompt's first token. top: (token id, log probability), best first."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


def from_logits(ids: Sequence[int], logits: np.ndarray, top: int) -> list[TokenLogprob]:
    """logits: [tokens, vocabulary], a row for each id. top: number of alternatives."""
    tokens = []
    for token_id, row in zip(ids, logits, strict=False):
        shifted = row.astype(np.float64) - row.max()
        log_probs = shifted - np.log(np.exp(shifted).sum())
        best = np.argpartition(-log_probs, min(top, len(row) - 1))[:top] if top else np.empty(0, int)
        best = best[np.argsort(-log_probs[best], kind="stable")]
        alternatives = tuple((int(i), float(log_probs[i])) for i in best)
        rank = 1 + int((log_probs > log_probs[token_id]).sum())
        tokens.append(TokenLogprob(token_id, float(log_probs[token_id]), alternatives, rank))
    return tokens


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
