"""PooledRequests: the methods of `LLM` for embeddings, labels and scores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from manylora.config.pooling import PoolingSettings
from manylora.errors import RequestCancelledError
from manylora.generation.defaults import OwnText
from manylora.generation.pooled import (
    PooledGeneration,
    PoolingParams,
    embedding,
    pair_score,
    pair_up,
    pooling_of,
    probabilities,
    similarity,
)
from manylora.generation.sampling import SamplingParams
from manylora.generation.tokenizer import Tokenizer
from manylora.llmapi.lora import LoRAChoice, is_choice, lora_of, members_of
from manylora.llmapi.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from manylora.llmapi.prompts import Prompt, as_prompts, for_each
from manylora.llmapi.service import Service
from manylora.request import Event, Pooling

TASKS = ("embed", "classify", "token_embed", "token_classify")
Loras = str | LoRAChoice | Sequence[str | LoRAChoice | None] | None


class LlmPooledGeneration(PooledGeneration):
    """A prompt of an LLM. result: its values."""

    def __init__(
        self, request_id: int, prompt: tuple[int, ...], pooling: Pooling, lora_request: LoRAChoice | None
    ) -> None:
        super().__init__(prompt, pooling, str(request_id))
        self.lora_request, self.lora = lora_request, lora_of(lora_request)
        self.task_ids = [one.lora_int_id for one, _ in members_of(lora_request)]
        self.from_disk = False
        self.result: Future[np.ndarray] = Future()

    def take(self, event: Event) -> None:
        super().take(event)
        if self.values is not None and not self.result.done():
            self.result.set_result(self.values)
        elif self.error is not None and not self.result.done():
            cancelled = RequestCancelledError("The request was cancelled")
            self.result.set_exception(event.error or cancelled)

    def fail(self, error: Exception) -> None:
        super().fail(error)
        if not self.result.done():
            self.result.set_exception(error)


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
            outputs.append(PoolingRequestOutput(int(first.request_id), score, ids, lora))
        return outputs


def _run(
    owner: _Owner, prompts: Any, task: str, params: PoolingParams, lora_request: Loras
) -> list[LlmPooledGeneration]:
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
) -> list[LlmPooledGeneration]:
    made: list[LlmPooledGeneration] = []
    try:
        for (ids, pooling), lora in zip(prompts, loras, strict=True):
            owner._claim(lora)
            made.append(LlmPooledGeneration(next(owner._ids), ids, pooling, lora))
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


def _output(one: LlmPooledGeneration, output: Any) -> PoolingRequestOutput[Any]:
    return PoolingRequestOutput(int(one.request_id), output, list(one.prompt), one.lora_request)
