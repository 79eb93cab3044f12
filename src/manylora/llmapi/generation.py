"""Generation: one request on its way, from the prompt to the outputs. Its events become pieces."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from manylora.llmapi.continuation import Continuation
from manylora.llmapi.decoding import Decoding
from manylora.llmapi.lora import LoRARequest
from manylora.llmapi.outputs import RequestOutput, RequestTimings
from manylora.llmapi.result import GenerationResult
from manylora.request import Event, LoraInput, Request
from manylora.text import Tokenizer

__all__ = ["Generation", "Prompt"]


@dataclass(frozen=True)
class Prompt:
    """text: None for a prompt that came as token ids. token_ids: as they are used."""

    text: str | None
    token_ids: tuple[int, ...]


class Generation:
    """`take` belongs to one thread. folder: of the adapter, None for the base model."""

    def __init__(
        self,
        request_id: int,
        prompt: Prompt,
        decoding: Decoding,
        lora_request: LoRARequest | None,
        folder: Path | None,
        streaming: bool,
        tokenizer: Tokenizer | None,
        abort: Callable[[Generation], None],
    ) -> None:
        self.request_id = request_id
        self.lora_request = lora_request
        self.folder = folder
        this = weakref.ref(self)  # not a cycle: whoever drops the last result frees the LLM at once
        self.result = GenerationResult(request_id, lambda: _abort_if_open(this(), abort))
        self._prompt = prompt
        self._decoding = decoding
        self._streaming = streaming
        self._started = time.monotonic()
        self._first_token: float | None = None
        count = decoding.params.num_return_sequences
        self._continuations = [Continuation(decoding.rules, tokenizer) for _ in range(count)]

    @property
    def task_id(self) -> int | None:
        return self.lora_request.lora_int_id if self.lora_request else None

    def request(self, lora: LoraInput | None) -> Request:
        """What the engine gets. lora: with tensors, or the id alone."""
        return Request(
            prompt=self._prompt.token_ids,
            params=self._decoding.params,
            lora=lora,
            streaming=self._streaming or self._decoding.stepwise,
            request_id=str(self.request_id),
        )

    def take(self, event: Event) -> None:
        """Add an event, and publish what it brings. Without effect once the request has ended."""
        if self.result.finished:
            return
        if event.error is not None:
            self.result.fail(event.error)
            return
        if self._first_token is None and event.token_ids and (self._streaming or self._decoding.stepwise):
            self._first_token = time.monotonic() - self._started
        continuation = self._continuations[event.sequence_index]
        continuation.extend(event.token_ids, event.log_probs, event.finish_reason)
        if event.last:
            for other in self._continuations:  # of a request that was cancelled before it began
                other.extend((), (), event.finish_reason)
        finished = all(c.finish_reason is not None for c in self._continuations)
        if finished or self._streaming:
            self.result.publish(self._output(finished))

    def _output(self, finished: bool) -> RequestOutput:
        chosen = self._continuations
        log_probs = self._decoding.logprobs
        cumulative = self._decoding.params.return_log_probs
        if self._decoding.n < len(chosen):
            chosen = sorted(chosen, key=lambda c: -c.cumulative_logprob)[: self._decoding.n]
        total = time.monotonic() - self._started if finished else None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=list(self._prompt.token_ids),
            outputs=[c.report(index, log_probs, cumulative) for index, c in enumerate(chosen)],
            finished=finished,
            lora_request=self.lora_request,
            timings=RequestTimings(self._first_token, total),
        )


def _abort_if_open(generation: Generation | None, abort: Callable[[Generation], None]) -> None:
    if generation is not None:
        abort(generation)
