"""Generation: the state of one prompt that is being continued. Continuation: one of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from manylora.errors import RequestError
from manylora.generation.decoding import Decoding, StopRules
from manylora.generation.outputs import CompletionOutput, Logprob, LoraVersion, TokenLogprob, from_logits
from manylora.generation.tokenizer import Tokenizer
from manylora.request import AdapterVersion, Event, FinishReason, LoraInput, LoraMix, Request, RequestMetrics


class StopTexts:
    """Texts that end an output wherever they appear. Empty ones are ignored."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text for text in texts if text]
        self.longest = max(map(len, self._texts), default=0)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def find(self, text: str, start: int = 0) -> list[tuple[int, str]]:
        """The first place of each text in text[start:]: (index in `text`, the stop text), if it is there."""
        return [(at, word) for word in self._texts if (at := text.find(word, start)) >= 0]

    def begun(self, text: str, start: int = 0) -> int:
        """How many characters at the end of text[start:] may be the beginning of one of them."""
        return max((overlap(text, word, start) for word in self._texts), default=0)


def overlap(text: str, word: str, start: int = 0) -> int:
    """Length of the longest proper prefix of `word` that text[start:] ends with."""
    longest = min(len(word) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


class Continuation:
    """Withholds what may become a stop text, or is half a character. tokenizer: None: no text."""

    def __init__(self, rules: StopRules, tokenizer: Tokenizer | None) -> None:
        self._rules, self._stops = rules, StopTexts(rules.texts)
        decode = rules.detokenize or rules.texts
        skips = rules.skip_special_tokens
        self._stream = tokenizer.stream(skips, rules.shown) if tokenizer and decode else None
        self._text = ""
        self._safe = 0  # characters of _text that may be reported
        self._search_from = 0  # no stop text begins before this character
        self._reported = (0, 0)  # characters and tokens in the last report
        self._log_probs: list[float] = []
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.generation_logits: list[np.ndarray] = []  # concatenated: [tokens of the engine, vocabulary]
        self.versions: tuple[AdapterVersion, ...] = ()  # versions of its adapter
        self.score: float | None = None  # score of a beam, used instead of the sum

    @property
    def cumulative_logprob(self) -> float:
        return sum(self._log_probs) if self.score is None else self.score

    def extend(
        self, token_ids: Sequence[int], log_probs: Sequence[float], finish: FinishReason | None
    ) -> None:
        """Add tokens from the engine. finish: why it ended the output. No effect after the end."""
        if self.finish_reason is not None:
            return
        start = len(self.token_ids)
        for i, token in enumerate(token_ids):
            stops = token in self._rules.end_ids or token in self._rules.ids
            if stops and len(self.token_ids) >= self._rules.min_tokens:
                if self._rules.include and token in self._rules.ids:
                    self._append(token, log_probs, i)
                self._end(start, FinishReason.STOP, self._rules.ids.get(token))
                return
            self._append(token, log_probs, i)
            if self._rules.texts:
                self._add_text(start, final=False)
                start = len(self.token_ids)
                if self._find_stop():
                    return
        if finish is not None:
            self._end(start, finish, None)
        elif not self._rules.texts:
            self._add_text(start, final=False)

    def report(self, index: int, log_probs: bool, cumulative: bool) -> CompletionOutput:
        """The output so far, and what is new since the last report."""
        num_chars, num_tokens = self._reported
        text = self._text[: self._safe] if self._rules.detokenize else ""
        self._reported = (len(text), len(self.token_ids))
        pairs = zip(self.token_ids, self._log_probs, strict=False)
        count = len(self.token_ids)  # the output may end before the engine's
        ends = [*(one.start for one in self.versions[1:]), count]
        versions = tuple(
            LoraVersion(one.name, one.number, one.digest, one.start, min(end, count))
            for one, end in zip(self.versions, ends, strict=False)
            if one.start < count or not one.start
        )
        logits: np.ndarray | None = None
        if self.generation_logits and self.finish_reason is not None:
            # [length, vocabulary]: a stop text may have ended the output before the engine did.
            logits = np.concatenate(self.generation_logits)[: len(self.token_ids)]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob if cumulative else None,
            logprobs=[{token: Logprob(value)} for token, value in pairs] if log_probs else None,
            finish_reason=self.finish_reason.value if self.finish_reason else None,
            stop_reason=self.stop_reason,
            text_diff=text[num_chars:],
            token_ids_diff=self.token_ids[num_tokens:],
            generation_logits=logits,
            lora_versions=versions,
        )

    def advance(self) -> str:
        """A cheaper `report`: only the text that is new since the last one."""
        first = self._reported[0]
        self._reported = (self._safe, len(self.token_ids))
        return self._text[first : self._safe]

    def _append(self, token: int, log_probs: Sequence[float], i: int) -> None:
        self.token_ids.append(token)
        if log_probs:
            self._log_probs.append(log_probs[i])

    def _end(self, start: int, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._add_text(start, final=True)
        if not self._find_stop():
            self.finish_reason, self.stop_reason = reason, stop_reason
            self._safe = len(self._text)

    def _add_text(self, start: int, final: bool) -> None:
        """Decode the tokens from `start` on, which have not been decoded yet."""
        if self._stream is None:
            return
        self._text += self._stream.add(self.token_ids[start:], final)
        if not self._rules.texts:
            self._safe = len(self._text)

    def _find_stop(self) -> bool:
        """End the output at the first stop text, or mark as safe what cannot belong to one."""
        if len(self.token_ids) < self._rules.min_tokens:
            self._search_from = self._safe = len(self._text)
            return False
        first = max(self._search_from, self._safe)
        found = self._stops.find(self._text, first)
        if not found:
            self._safe = len(self._text) - self._stops.begun(self._text, first)
            return False
        at, text = min(found)
        self._text = self._text[: at + len(text) if self._rules.include else at]
        self._safe = len(self._text)
        self.finish_reason, self.stop_reason = FinishReason.STOP, text
        return True


class Generation:
    """Turns the events of one request into its outputs. `take` must be called from one thread only.

    encoder_prompt: see `Request`. tokenizer: None: outputs have no text. adapter: name of the one that acts,
    if the engine knows it by another name. ended: the engine will send no more events. started: it has sent
    one without an error. complete: every output has ended, perhaps at a stop text, which the engine does not
    know. metrics: of the sequence that ended last. context_logits: [prompt, vocabulary] float32, if
    requested.
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
        if event.metrics is not None:  # of several sequences, later ones use what the first has computed
            least = min(one.cached_tokens for one in (self.metrics, event.metrics) if one is not None)
            self.metrics = replace(event.metrics, cached_tokens=least)
        if event.context_logits is not None:
            self.context_logits = event.context_logits
        if self.decoding.top and event.token_ids:
            if event.generation_logits is None:  # NVIDIA's engine may not return them
                self.error = RequestError("The engine gives no logits: alternatives cannot be shown")
                return
            rows = event.generation_logits[-len(event.token_ids) :]
            found = from_logits(event.token_ids, rows, self.decoding.top)
            self._alternatives[event.sequence_index] += found
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
        """The n outputs in their current state; with best_of > n, the n best once all are complete."""
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
    def num_output(self) -> int:
        """Tokens in the outputs that `report` returns."""
        if self.decoding.prompt_only:
            return 0
        return sum(len(self._outputs[i].token_ids) for i in self._order[: self.decoding.n])

    @property
    def streamed_outputs(self) -> list[Continuation]:
        """The n outputs that a stream returns."""
        return self._outputs[: self.decoding.n]

    def alternatives(self, index: int) -> Sequence[TokenLogprob]:
        """For each token of the output that `report` returns at `index`. Empty unless requested."""
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
