"""Generation: one request from prompt to outputs. Its events become parts of the outputs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from manylora.generation.tokenizer import Tokenizer
from manylora.llmapi.continuation import Continuation
from manylora.llmapi.decoding import Decoding
from manylora.llmapi.lora import LoRAChoice, lora_of, members_of
from manylora.llmapi.outputs import GenerationResult, RequestOutput, RequestTimings
from manylora.llmapi.prompts import Prompt
from manylora.request import Event, FinishReason, Request, RequestMetrics


class Generation:
    """`take` must be called from one thread only."""

    def __init__(
        self,
        request_id: int,
        prompt: Prompt,
        decoding: Decoding,
        lora_request: LoRAChoice | None,
        streaming: bool,
        tokenizer: Tokenizer | None,
        abort: Callable[[Generation], None],
    ) -> None:
        self.request_id = request_id
        self.lora_request = lora_request
        self.from_disk = False  # its adapter was not in the cache
        this = weakref.ref(self)  # avoids a reference cycle: dropping the last result frees the LLM at once
        self.result = GenerationResult(request_id, lambda: _abort_if_open(this(), abort))
        self._prompt = prompt
        self._decoding = decoding
        self._streaming = streaming
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._metrics: RequestMetrics | None = None
        self._context_logits: np.ndarray | None = None
        count = decoding.num_results
        self._continuations = [Continuation(decoding.rules, tokenizer) for _ in range(count)]

    @property
    def task_ids(self) -> list[int]:
        """Ids of its adapters."""
        return [one.lora_int_id for one, _ in members_of(self.lora_request)]

    def request(self) -> Request:
        """The request for the engine, with adapters by id. Raises RequestError."""
        prompt = self._prompt
        return Request(
            prompt=prompt.token_ids if prompt.decoder_ids is None else prompt.decoder_ids,
            encoder_prompt=() if prompt.decoder_ids is None else prompt.token_ids,
            params=self._decoding.params,
            lora=lora_of(self.lora_request, follow=True),
            streaming=self._streaming or self._decoding.stepwise,
            request_id=str(self.request_id),
        )

    def take(self, event: Event) -> None:
        """Add an event and publish what it brings. No effect once the request has ended."""
        if self.result.finished:
            return
        if event.error is not None:
            self.result.fail(event.error)
            return
        if self._streaming and self._first_token is None and event.token_ids:
            self._first_token = time.monotonic() - self._started
        self._metrics = event.metrics or self._metrics
        if event.context_logits is not None:
            self._context_logits = event.context_logits
        if event.versions:
            self._note_versions(event)
        if event.beams:
            self._take_beams(event)
        else:
            continuation = self._continuations[event.sequence_index]
            continuation.extend(event.token_ids, event.log_probs, event.finish_reason)
            if event.generation_logits is not None:
                continuation.generation_logits.append(event.generation_logits)
        if event.last:
            for other in self._continuations:  # the request was cancelled before it started
                other.extend((), (), event.finish_reason)
        # Without streaming, logits come with an output's last event, even if a stop text ended it before.
        finished = self.done and (event.last or not self._decoding.params.return_generation_logits)
        if finished or (self._streaming and not self.done):
            self.result.publish(self._output(finished))

    @property
    def done(self) -> bool:
        """Whether every output has ended, so that the engine can stop."""
        return all(c.finish_reason is not None for c in self._continuations)

    def _note_versions(self, event: Event) -> None:
        """Record versions. The engine identifies an adapter by its id."""
        name = next(one.lora_name for one, scale in members_of(self.lora_request) if scale)
        versions = tuple(replace(one, name=name) for one in event.versions)
        every = self._continuations if event.beams else [self._continuations[event.sequence_index]]
        for continuation in every:
            continuation.versions = versions

    def _take_beams(self, event: Event) -> None:
        longest = self._decoding.params.max_tokens
        for continuation, beam in zip(self._continuations, event.beams, strict=False):
            cut_off = len(beam.token_ids) >= longest
            reason = FinishReason.LENGTH if cut_off else FinishReason.STOP
            continuation.extend(beam.token_ids, beam.log_probs, reason)
            continuation.score = beam.cum_log_prob
        del self._continuations[len(event.beams) :]

    def _output(self, finished: bool) -> RequestOutput:
        chosen = self._continuations
        log_probs = self._decoding.logprobs
        beams = self._decoding.params.beam_width > 1
        cumulative = self._decoding.params.return_log_probs or beams
        if self._decoding.n < len(chosen):
            # Beams arrive best first, by a score that includes the length penalty.
            chosen = chosen if beams else sorted(chosen, key=lambda c: -c.cumulative_logprob)
            chosen = chosen[: self._decoding.n]
        total = time.monotonic() - self._started if finished else None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=list(self._prompt.token_ids),
            outputs=[c.report(index, log_probs, cumulative) for index, c in enumerate(chosen)],
            finished=finished,
            lora_request=self.lora_request,
            timings=RequestTimings(self._first_token_s(), total),
            adapter_tier=self._tier(),
            metrics=self._metrics,
            context_logits=self._context_logits,
        )

    def _first_token_s(self) -> float | None:
        if self._first_token is None and self._metrics and self._metrics.first_token_ns:
            return self._metrics.first_token_ns * 1e-9 - self._started
        return self._first_token

    def _tier(self) -> str:
        if self.lora_request is None:
            return ""
        # Whether it was read for this request or another one, this request waited for the disk.
        return "disk" if self.from_disk else self._metrics.adapter_tier if self._metrics else ""


def _abort_if_open(generation: Generation | None, abort: Callable[[Generation], None]) -> None:
    if generation is not None:
        abort(generation)
