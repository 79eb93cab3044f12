"""GenerationState: the state of one prompt being continued. Turns the engine's events into outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from manylora.errors import RequestError
from manylora.generation.tokenizer import Tokenizer
from manylora.llmapi.continuation import Continuation
from manylora.llmapi.outputs import CompletionOutput
from manylora.openai.api.errors import FORMAT, ApiError, renamed
from manylora.openai.api.logprobs import TokenLogprob, from_logits
from manylora.openai.api.params import Plan
from manylora.openai.serving.waits import Signal
from manylora.request import Event, FinishReason, LoraInput, LoraMix, Request, RequestMetrics


@dataclass(eq=False)
class GenerationState:
    """Belongs to the event loop.

    changed:  set after every change; the generations of one HTTP request share it.
    error:    why it failed.
    ended:    the engine will send no more events.
    started:  the engine has sent an event without an error.
    complete: every output has ended, perhaps at a stop text, which the engine does not know.
    context_logits: [prompt, vocabulary] float32, if requested.
    """

    prompt: tuple[int, ...]
    plan: Plan
    streaming: bool
    tokenizer: Tokenizer
    request_id: str
    changed: Signal = field(default_factory=Signal)
    error: Exception | None = None
    ended: bool = False
    started: bool = False
    complete: bool = False
    metrics: RequestMetrics | None = None
    context_logits: np.ndarray | None = None

    def __post_init__(self) -> None:
        count = self.plan.decoding.params.num_return_sequences
        rules = self.plan.decoding.rules
        self._outputs = [Continuation(rules, self.tokenizer) for _ in range(count)]
        self._alternatives: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self._order = list(range(count))  # order in which outputs are returned

    @property
    def finished(self) -> bool:
        return self.error is not None or self.complete

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for it at the same time."""
        return self.plan.decoding.params.num_return_sequences

    @property
    def is_complete(self) -> bool:
        return self.complete

    def request(self, lora: LoraInput | LoraMix | None) -> Request:
        """The request for the engine."""
        decoding = self.plan.decoding
        return Request(
            prompt=self.prompt,
            params=decoding.params,
            lora=lora,
            # A stream returns logits step by step. Otherwise the engine would keep all of them until the end.
            streaming=self.streaming or decoding.stepwise or decoding.params.return_generation_logits,
            request_id=self.request_id,
            cache_salt=self.plan.cache_salt,
        )

    def take(self, event: Event) -> None:
        """Apply an event of the engine. No effect once the generation has finished."""
        self.ended = self.ended or event.last
        if self.finished:
            return
        is_first = not self.started and event.error is None
        self.started = self.started or is_first
        self.metrics = event.metrics or self.metrics
        if event.context_logits is not None:
            self.context_logits = event.context_logits
        if self.plan.top and event.token_ids:
            self._take_alternatives(event)
        if is_first and self.plan.prompt_top is not None and event.context_logits is None:
            self.error = RequestError("The engine gives no logits of prompts: leave prompt_logprobs out")
        elif event.error is not None:
            self.error = self._named(event.error)
        else:
            output = self._outputs[event.sequence_index]
            output.versions = event.versions
            output.extend(event.token_ids, event.log_probs, event.finish_reason)
            if event.last:
                # A request that is cancelled before it starts has no event per output.
                for other in self._outputs:
                    other.extend((), (), event.finish_reason or FinishReason.CANCELLED)
            if output.finish_reason is not None:
                self.complete = all(one.finish_reason is not None for one in self._outputs)
        self.changed.set()

    def _take_alternatives(self, event: Event) -> None:
        if event.generation_logits is None:  # NVIDIA's engine may not return them
            self.error = RequestError("The engine gives no logits: alternatives cannot be shown")
            return
        rows = event.generation_logits[-len(event.token_ids) :]
        found = from_logits(event.token_ids, rows, self.plan.top or 0)
        self._alternatives[event.sequence_index] += found

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.ended = True
        if not self.finished:
            self.error = self._named(error)
        self.changed.set()

    def _named(self, error: Exception) -> Exception:
        """The error with the name of the field that the guide came from."""
        return renamed(error, {FORMAT: self.plan.guide_field}) if isinstance(error, ApiError) else error

    def report(self) -> list[CompletionOutput]:
        """The n outputs to return in their current state, with what is new in each. With best_of > n, the n
        best once all are complete.
        """
        decoding = self.plan.decoding
        if decoding.n < len(self._outputs) and self.complete:
            ranked = sorted(self._order, key=lambda i: -self._outputs[i].cumulative_logprob)
            self._order = ranked[: decoding.n]
        wanted = self._order[: decoding.n]
        return [
            self._outputs[i].report(at, decoding.logprobs, decoding.logprobs) for at, i in enumerate(wanted)
        ]

    @property
    def streamed_outputs(self) -> list[Continuation]:
        """The n outputs that a stream returns."""
        return self._outputs[: self.plan.decoding.n]

    def alternatives(self, index: int) -> list[TokenLogprob]:
        """Alternatives for each token of the output that `report` returns at `index`. Empty unless
        requested.
        """
        return self._alternatives[self._order[index]]
