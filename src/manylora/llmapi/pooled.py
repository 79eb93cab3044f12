"""PooledRequests: the methods of `LLM` for embeddings, labels and scores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from manylora.config.pooling import PoolingSettings
from manylora.errors import RequestCancelledError
from manylora.generation.tokenizer import Tokenizer
from manylora.llmapi.lora import LoRAChoice, is_choice, lora_of, members_of
from manylora.llmapi.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    embedding,
    probabilities,
    similarity,
)
from manylora.llmapi.prompts import Prompt, as_prompts, for_each
from manylora.llmapi.sampling import SamplingParams
from manylora.llmapi.service import Service
from manylora.lora.text.adapter_text import OwnText
from manylora.request import Event, Pooling, Request

TASKS = ("embed", "classify", "token_embed", "token_classify")
Loras = str | LoRAChoice | Sequence[str | LoRAChoice | None] | None


class PooledResult(Future[np.ndarray]):
    """The values of one prompt."""

    @property
    def finished(self) -> bool:
        return self.done()

    def fail(self, error: BaseException) -> None:
        if not self.done():
            self.set_exception(error)


@dataclass(eq=False)
class PooledGeneration:
    """A prompt without generated tokens. Has the interface of `Generation` for a Service."""

    request_id: int
    prompt: tuple[int, ...]
    pooling: Pooling
    lora_request: LoRAChoice | None
    from_disk: bool = False
    result: PooledResult = field(default_factory=PooledResult)

    @property
    def task_ids(self) -> list[int]:
        return [one.lora_int_id for one, _ in members_of(self.lora_request)]

    @property
    def done(self) -> bool:
        return self.result.finished

    def request(self) -> Request:
        lora, name = lora_of(self.lora_request), str(self.request_id)
        return Request(self.prompt, lora=lora, pooling=self.pooling, request_id=name)

    def take(self, event: Event) -> None:
        if self.result.finished:
            return
        if event.error is not None:
            self.result.fail(event.error)
        elif event.pooled is not None:
            self.result.set_result(event.pooled)
        elif event.last:
            self.result.fail(RequestCancelledError("The request was cancelled"))


class _Owner(Protocol):
    """The parts of an LLM that the methods need."""

    _pooling: PoolingSettings
    _service: Service
    _ids: itertools.count[int]
    _tokenizer: Tokenizer | None

    def _named(self, lora_request: Any) -> Any: ...

    def _text_of(self, lora_request: LoRAChoice | None) -> OwnText | None: ...

    def _encode(self, inputs: Any, params: SamplingParams, lora_request: LoRAChoice | None) -> Prompt: ...

    def _claim(self, lora_request: LoRAChoice | None) -> None: ...

    @property
    def _is_cross_encoder(self) -> bool: ...


class PooledRequests:
    """Mixed into `LLM`. Every method waits. Several prompts are a list and may use different adapters, one
    choice each.

    Raises RequestError or ValueError for the first prompt that cannot be served.
    """

    def embed(
        self: _Owner, prompts: Any, *, pooling_params: PoolingParams | None = None, lora_request: Loras = None
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """An embedding of each prompt, pooled and normalised as configured in the model's folder."""
        params = pooling_params or PoolingParams()
        made = _run(self, prompts, "embed", params, lora_request)
        found = [embedding(one.result.result(), self._pooling, params) for one in made]
        return [
            _output(one, EmbeddingOutput(values.tolist())) for one, values in zip(made, found, strict=True)
        ]

    def classify(
        self: _Owner, prompts: Any, *, pooling_params: PoolingParams | None = None, lora_request: Loras = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Probabilities of the labels of the adapter's classification head, or else of the model's own."""
        params = pooling_params or PoolingParams()
        made = _run(self, prompts, "classify", params, lora_request)
        found = [probabilities(one.result.result(), self._pooling, params.use_activation) for one in made]
        return [
            _output(one, ClassificationOutput(values.tolist()))
            for one, values in zip(made, found, strict=True)
        ]

    def reward(
        self: _Owner, prompts: Any, *, pooling_params: PoolingParams | None = None, lora_request: Loras = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The head's raw output for the last token."""
        params = pooling_params or PoolingParams()
        made = _run(self, prompts, "classify", params, lora_request)
        return [_output(one, PoolingOutput(one.result.result())) for one in made]

    def encode(
        self: _Owner,
        prompts: Any,
        *,
        pooling_task: str = "embed",
        pooling_params: PoolingParams | None = None,
        lora_request: Loras = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """pooling_task: embed, classify, token_embed or token_classify."""
        if pooling_task not in TASKS:
            raise ValueError(f"pooling_task must be one of {', '.join(TASKS)}, got {pooling_task!r:.40}")
        params = pooling_params or PoolingParams()
        made = _run(self, prompts, pooling_task, params, lora_request)
        outputs = []
        for one in made:
            values = one.result.result()
            if one.pooling.head:
                values = probabilities(values, self._pooling, params.use_activation)
            else:
                values = embedding(values, self._pooling, params)
            outputs.append(_output(one, PoolingOutput(values)))
        return outputs

    def score(
        self: _Owner,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: str | LoRAChoice | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """The score of each pair. A single text_1 is paired with every text_2.

        With a head (the adapter's, or the model's with one label), the head reads both texts together, and
        the score is the sigmoid of its first value. Otherwise the score is the cosine of both embeddings.
        """
        params = pooling_params or PoolingParams()
        pairs, lora = pair_up(text_1, text_2), self._named(lora_request)
        if self._is_cross_encoder or self._service.registry.has_head(lora):
            own = self._text_of(lora)
            tokenizer = self._tokenizer if own is None else own.tokenizer
            if tokenizer is None:
                raise ValueError("score needs a tokenizer: leave skip_tokenizer_init out")
            joined = [tokenizer.encode_pair(*pair) for pair in pairs]
            prompts = [
                (tuple(ids), Pooling(self._pooling.head_mode, head=True, first=first))
                for ids, first in joined
            ]
            made = _submit(self, prompts, _loras_of(prompts, lora))
            return [
                _output(one, ScoringOutput(pair_score(one.result.result(), self._pooling, params)))
                for one in made
            ]
        flat = [text for pair in pairs for text in pair]
        embedded = _run(self, flat, "embed", params, lora)
        values = [embedding(one.result.result(), self._pooling, params) for one in embedded]
        outputs = []
        for first, second, a, b in zip(embedded[::2], embedded[1::2], values[::2], values[1::2], strict=True):
            ids = [*first.prompt, *second.prompt]
            score = ScoringOutput(similarity(a, b))
            outputs.append(PoolingRequestOutput(first.request_id, score, ids, lora))
        return outputs


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


def _run(
    owner: _Owner, prompts: Any, task: str, params: PoolingParams, lora_request: Loras
) -> list[PooledGeneration]:
    """The generations, submitted and finished."""
    given, _ = as_prompts(prompts)
    sampling = SamplingParams(
        truncate_prompt_tokens=params.truncate_prompt_tokens, add_special_tokens=params.add_special_tokens
    )
    loras = _loras_of(given, owner._named(lora_request))
    pairs = zip(given, loras, strict=True)
    ids = [owner._encode(one, sampling, lora).token_ids for one, lora in pairs]
    pooling = pooling_of(task, owner._pooling)
    return _submit(owner, [(one, pooling) for one in ids], loras)


def hidden_state(owner: _Owner, token: int, lora_request: LoRAChoice | None) -> None:
    """Compute a hidden state, which works with any adapter. Raises RequestError."""
    _submit(owner, [((token,), Pooling())], [lora_request])


def _loras_of(prompts: Sequence[Any], lora_request: Any) -> list[LoRAChoice | None]:
    return for_each(prompts, "lora_request", lora_request, is_choice(lora_request))


def _submit(
    owner: _Owner,
    prompts: Sequence[tuple[tuple[int, ...], Pooling]],
    loras: Sequence[LoRAChoice | None],
) -> list[PooledGeneration]:
    made: list[PooledGeneration] = []
    try:
        for (ids, pooling), lora in zip(prompts, loras, strict=True):
            owner._claim(lora)
            made.append(PooledGeneration(next(owner._ids), ids, pooling, lora))
    except BaseException:
        for one in made:
            owner._service.discard(one)
        raise
    for one in made:
        owner._service.send(one)
    failed: BaseException | None = None
    for one in made:
        failed = failed or one.result.exception()
    if failed is not None:
        raise failed
    return made


def _output(one: PooledGeneration, output: Any) -> PoolingRequestOutput[Any]:
    return PoolingRequestOutput(one.request_id, output, list(one.prompt), one.lora_request)
