"""LlmGeneration: one request of an LLM, from prompt to RequestOutput."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from manylora.generation.decoding import Decoding
from manylora.generation.generation import Generation
from manylora.generation.tokenizer import Tokenizer
from manylora.llmapi.lora import LoRAChoice, lora_of, members_of
from manylora.llmapi.outputs import GenerationResult, RequestOutput, RequestTimings
from manylora.llmapi.prompts import Prompt
from manylora.request import Event


class LlmGeneration(Generation):
    """Publishes what each event brings on its `result`. Raises RequestError for adapters that exclude each
    other.
    """

    def __init__(
        self,
        request_id: int,
        prompt: Prompt,
        decoding: Decoding,
        lora_request: LoRAChoice | None,
        streaming: bool,
        tokenizer: Tokenizer | None,
        abort: Callable[[LlmGeneration], None],
    ) -> None:
        members = members_of(lora_request)
        acting = next((one.lora_name for one, scale in members if scale), None)
        decoder = prompt.decoder_ids
        ids, encoder = (prompt.token_ids, ()) if decoder is None else (decoder, prompt.token_ids)
        super().__init__(ids, decoding, tokenizer, streaming, str(request_id), encoder, acting)
        self.lora_request = lora_request
        self.lora = lora_of(lora_request, follow=True)
        self.task_ids = [one.lora_int_id for one, _ in members]
        self.from_disk = False  # its adapter was not in the cache
        this = weakref.ref(self)  # avoids a reference cycle: dropping the last result frees the LLM at once
        self.result = GenerationResult(request_id, lambda: _abort_if_open(this(), abort))
        self._prompt = prompt
        self._arrived = time.monotonic()
        self._first_token: float | None = None

    def take(self, event: Event) -> None:
        """Apply an event and publish what it brings. No effect once the request has ended."""
        if self.result.finished:
            return
        super().take(event)
        if self.error is not None:
            self.result.fail(self.error)
            return
        if self.streaming and self._first_token is None and event.token_ids:
            self._first_token = time.monotonic() - self._arrived
        if self.finished or (self.streaming and not self.complete):
            self.result.publish(self._output())

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self.result.fail(error)

    def _output(self) -> RequestOutput:
        total = time.monotonic() - self._arrived if self.finished else None
        return RequestOutput(
            request_id=self.result.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=list(self._prompt.token_ids),
            outputs=self.report(),
            finished=self.finished,
            lora_request=self.lora_request,
            timings=RequestTimings(self._first_token_s(), total),
            adapter_tier=self._tier(),
            metrics=self.metrics,
            context_logits=self.context_logits,
        )

    def _first_token_s(self) -> float | None:
        if self._first_token is None and self.metrics and self.metrics.first_token_ns:
            return self.metrics.first_token_ns * 1e-9 - self._arrived
        return self._first_token

    def _tier(self) -> str:
        if self.lora_request is None:
            return ""
        # Whether it was read for this request or another one, this request waited for the disk.
        return "disk" if self.from_disk else self.metrics.adapter_tier if self.metrics else ""


def _abort_if_open(generation: LlmGeneration | None, abort: Callable[[LlmGeneration], None]) -> None:
    if generation is not None:
        abort(generation)
