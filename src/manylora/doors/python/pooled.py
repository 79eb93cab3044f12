"""PooledRequests: the methods of `LLM` for embeddings, labels and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from manylora.doors.python.base import BaseLLM
from manylora.doors.python.lora import LoRAChoice, is_choice
from manylora.doors.python.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from manylora.doors.python.prompts import as_prompts, for_each
from manylora.doors.python.service import LlmPooledGeneration
from manylora.generation.pooled import (
    PoolingParams,
    embedding,
    pair_score,
    pair_up,
    pooling_of,
    probabilities,
    similarity,
)
from manylora.generation.sampling import SamplingParams
from manylora.request import Pooling

TASKS = ("embed", "classify", "token_embed", "token_classify")
Loras = str | LoRAChoice | Sequence[str | LoRAChoice | None] | None


class PooledRequests(BaseLLM):
    """Every method waits. Raises RequestError or ValueError for the first prompt that cannot be served."""

    def embed(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, lora_request: Loras = None
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """An embedding of each prompt, pooled and normalised as configured in the model's folder."""
        found = self._pooled(prompts, "embed", pooling_params, lora_request)
        return [_output(one, EmbeddingOutput(values.tolist())) for one, values in found]

    def classify(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, lora_request: Loras = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Probabilities of the labels of the adapter's classification head, or else of the model's own."""
        found = self._pooled(prompts, "classify", pooling_params, lora_request)
        return [_output(one, ClassificationOutput(values.tolist())) for one, values in found]

    def reward(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, lora_request: Loras = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The head's raw output for the last token."""
        made = self._run(prompts, "classify", pooling_params or PoolingParams(), lora_request)
        return [_output(one, PoolingOutput(one.result.result())) for one in made]

    def encode(
        self,
        prompts: Any,
        *,
        pooling_task: str = "embed",
        pooling_params: PoolingParams | None = None,
        lora_request: Loras = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """pooling_task: embed, classify, token_embed or token_classify."""
        if pooling_task not in TASKS:
            raise ValueError(f"pooling_task must be one of {', '.join(TASKS)}, got {pooling_task!r:.40}")
        found = self._pooled(prompts, pooling_task, pooling_params, lora_request)
        return [_output(one, PoolingOutput(values)) for one, values in found]

    def score(
        self,
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
        if self._model.num_labels == 1 or self._service.registry.has_head(lora):
            tokenizer = self._tokenizer_for(lora)
            if tokenizer is None:
                raise ValueError("score needs a tokenizer: leave skip_tokenizer_init out")
            joined = [tokenizer.encode_pair(*pair) for pair in pairs]
            prompts = [
                (tuple(ids), Pooling(self._pooling.head_mode, head=True, first=first))
                for ids, first in joined
            ]
            made = self._submit_all(prompts, for_each(prompts, "lora_request", lora, is_choice(lora)))
            scores = [pair_score(one.result.result(), self._pooling, params) for one in made]
            return [_output(one, ScoringOutput(score)) for one, score in zip(made, scores, strict=True)]
        flat = [text for pair in pairs for text in pair]
        found = self._pooled(flat, "embed", params, lora)
        outputs = []
        for (first, a), (second, b) in zip(found[::2], found[1::2], strict=True):
            ids = [*first.prompt, *second.prompt]
            score = ScoringOutput(similarity(a, b))
            outputs.append(PoolingRequestOutput(int(first.request_id), score, ids, lora))
        return outputs

    def _pooled(
        self, prompts: Any, task: str, params: PoolingParams | None, lora_request: Loras
    ) -> list[tuple[LlmPooledGeneration, np.ndarray]]:
        """Each with its probabilities or its embedding."""
        params, found = params or PoolingParams(), []
        for one in self._run(prompts, task, params, lora_request):
            values = one.result.result()
            if one.pooling.head:
                values = probabilities(values, self._pooling, params.use_activation)
            else:
                values = embedding(values, self._pooling, params)
            found.append((one, values))
        return found

    def _run(
        self, prompts: Any, task: str, params: PoolingParams, lora_request: Loras
    ) -> list[LlmPooledGeneration]:
        """The generations, submitted and finished."""
        given, _ = as_prompts(prompts)
        sampling = SamplingParams(
            truncate_prompt_tokens=params.truncate_prompt_tokens, add_special_tokens=params.add_special_tokens
        )
        named, pooling = self._named(lora_request), pooling_of(task, self._pooling)
        loras = for_each(given, "lora_request", named, is_choice(named))
        read = [
            self._read(one, sampling, self._tokenizer_for(lora))
            for one, lora in zip(given, loras, strict=True)
        ]
        return self._submit_all([(one.token_ids, pooling) for one in read], loras)

    def _hidden_state(self, token: int, lora_request: LoRAChoice | None) -> None:
        """Compute a hidden state, which works with any adapter. Raises RequestError."""
        self._submit_all([((token,), Pooling())], [lora_request])

    def _submit_all(
        self, prompts: Sequence[tuple[tuple[int, ...], Pooling]], loras: Sequence[LoRAChoice | None]
    ) -> list[LlmPooledGeneration]:
        made: list[LlmPooledGeneration] = []
        try:
            for (ids, pooling), lora in zip(prompts, loras, strict=True):
                self._claim(lora)
                made.append(LlmPooledGeneration(next(self._ids), ids, pooling, lora))
        except BaseException:
            for one in made:
                self._service.discard(one)
            raise
        for one in made:
            self._service.send(one)
        errors = [one.result.exception() for one in made]  # waits for all of them
        if failed := next(filter(None, errors), None):
            raise failed
        return made


def _output(one: LlmPooledGeneration, output: Any) -> PoolingRequestOutput[Any]:
    return PoolingRequestOutput(int(one.request_id), output, list(one.prompt), one.lora_request)
