"""Generation: the state of one prompt that is being continued, whoever asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from manylora.errors import RequestError
from manylora.generation.continuation import Continuation
from manylora.generation.decoding import Decoding
from manylora.generation.outputs import CompletionOutput, TokenLogprob, from_logits
from manylora.generation.tokenizer import Tokenizer
from manylora.request import AdapterVersion, Event, FinishReason, LoraInput, LoraMix, Request, RequestMetrics


class Generation:
    """Turns the events of one request into its outputs. `take` must be called from one thread only.

    prompt:    token ids. encoder_prompt: for an encoder-decoder model; see `Request`.
    tokenizer: None: outputs have no text.
    adapter:   name of the adapter that acts, if the engine knows it by another name. None: the engine's.

    error:     why it failed.
    ended:     the engine will send no more events.
    started:   the engine has sent an event without an error.
    complete:  every output has ended, perhaps at a stop text, which the engine does not know.
    metrics:   of the sequence that ended last.
    context_logits: [prompt, vocabulary] float32, if requested.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        decoding: Decoding,
        tokenizer: Tokenizer | None,
        streaming: bool,
        request_id: str = "",
        encoder_prompt: tuple[int, ...] = (),
        adapter: str | None = None,
    ) -> None:
        self.prompt, self.decoding, self.streaming = prompt, decoding, streaming
        self.request_id = request_id
        self._encoder_prompt, self._adapter = encoder_prompt, adapter
        count = decoding.num_results
        self._outputs = [Continuation(decoding.rules, tokenizer) for _ in range(count)]
        self._alternatives: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self._order = list(range(count))  # order in which outputs are returned
        self._keeps_logits = decoding.params.return_generation_logits and decoding.top is None
        self.error: Exception | None = None
        self.ended = self.started = self.complete = False
        self.metrics: RequestMetrics | None = None
        self.context_logits: np.ndarray | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing changes any more. Logits may come with the engine's last event only."""
        complete = self.complete and (self.ended or not self._keeps_logits)
        return complete or self.error is not None

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for it at the same time."""
        return self.decoding.num_results

    def request(self, lora: LoraInput | LoraMix | None) -> Request:
        """The request for the engine. Raises RequestError."""
        decoding = self.decoding
        return Request(
            prompt=self.prompt,
            encoder_prompt=self._encoder_prompt,
            params=decoding.params,
            lora=lora,
            # A stream returns alternatives step by step. Otherwise the engine would keep all rows of logits.
            streaming=self.streaming or decoding.stepwise or bool(decoding.top),
            request_id=self.request_id,
            cache_salt=decoding.cache_salt,
        )

    def take(self, event: Event) -> None:
        """Apply an event of the engine. No effect once the generation has finished."""
        finished, self.ended = self.finished, self.ended or event.last
        if finished:
            return
        if event.error is not None:
            self.error = event.error
            return
        is_first, self.started = not self.started, True
        if is_first and self.decoding.prompt_top is not None and event.context_logits is None:
            self.error = RequestError("The engine gives no logits of prompts: leave prompt_logprobs out")
            return
        self.metrics = event.metrics or self.metrics
        if event.context_logits is not None:
            self.context_logits = event.context_logits
        if self.decoding.top and event.token_ids:
            self._take_alternatives(event)
            if self.error is not None:
                return
        ended = self._take_beams(event) if event.beams else self._take_tokens(event)
        if event.last:
            # A request that is cancelled before it starts has no event per output.
            for output in self._outputs:
                output.extend((), (), event.finish_reason or FinishReason.CANCELLED)
        if ended or event.last:
            self.complete = all(output.finish_reason is not None for output in self._outputs)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.ended = True
        if not self.finished:
            self.error = error

    def report(self) -> list[CompletionOutput]:
        """The n outputs to return in their current state, with what is new in each. With best_of > n, the n
        best once all are complete.
        """
        decoding = self.decoding
        beams = decoding.params.beam_width > 1  # they arrive best first, by a score with a length penalty
        if self.complete and decoding.n < len(self._order):
            if not beams:
                self._order.sort(key=lambda i: -self._outputs[i].cumulative_logprob)
            del self._order[decoding.n :]
        cumulative = decoding.params.return_log_probs or beams
        return [
            self._outputs[i].report(at, decoding.logprobs, cumulative)
            for at, i in enumerate(self._order[: decoding.n])
        ]

    @property
    def streamed_outputs(self) -> list[Continuation]:
        """The n outputs that a stream returns."""
        return self._outputs[: self.decoding.n]

    def alternatives(self, index: int) -> Sequence[TokenLogprob]:
        """Alternatives for each token of the output that `report` returns at `index`. Empty unless
        requested.
        """
        return self._alternatives[self._order[index]]

    def _take_tokens(self, event: Event) -> bool:
        """Whether the output has ended."""
        output = self._outputs[event.sequence_index]
        if event.versions:
            output.versions = self._named(event)
        output.extend(event.token_ids, event.log_probs, event.finish_reason)
        if event.generation_logits is not None and self._keeps_logits:
            output.generation_logits.append(event.generation_logits)
        return output.finish_reason is not None

    def _take_beams(self, event: Event) -> bool:
        """Whether the outputs have ended: beams come at the end only."""
        longest = self.decoding.params.max_tokens
        for output, beam in zip(self._outputs, event.beams, strict=False):
            cut_off = len(beam.token_ids) >= longest
            reason = FinishReason.LENGTH if cut_off else FinishReason.STOP
            output.versions = self._named(event)
            output.extend(beam.token_ids, beam.log_probs, reason)
            output.score = beam.cum_log_prob
        del self._outputs[len(event.beams) :], self._order[len(event.beams) :]
        return True

    def _named(self, event: Event) -> tuple[AdapterVersion, ...]:
        if self._adapter is None:
            return event.versions
        return tuple(replace(one, name=self._adapter) for one in event.versions)

    def _take_alternatives(self, event: Event) -> None:
        if event.generation_logits is None:  # NVIDIA's engine may not return them
            self.error = RequestError("The engine gives no logits: alternatives cannot be shown")
            return
        rows = event.generation_logits[-len(event.token_ids) :]
        found = from_logits(event.token_ids, rows, self.decoding.top or 0)
        self._alternatives[event.sequence_index] += found
