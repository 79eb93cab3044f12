"""PooledState: a prompt for which hidden states or labels are computed, as a Job of the backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manylora.errors import RequestError
from manylora.openai.serving.waits import Signal
from manylora.request import Event, LoraInput, LoraMix, Pooling, Request, RequestMetrics


@dataclass(eq=False)
class PooledState:
    """values: float32, [n] or [tokens, n]; None until computed. The rest is as in GenerationState."""

    prompt: tuple[int, ...]
    pooling: Pooling
    request_id: str
    changed: Signal
    cache_salt: str = ""
    error: Exception | None = None
    ended: bool = False
    values: np.ndarray | None = None
    metrics: RequestMetrics | None = None
    num_sequences: int = 1

    @property
    def finished(self) -> bool:
        return self.error is not None or self.values is not None

    @property
    def is_complete(self) -> bool:
        return self.finished

    def request(self, lora: LoraInput | LoraMix | None) -> Request:
        return Request(
            self.prompt,
            lora=lora,
            pooling=self.pooling,
            request_id=self.request_id,
            cache_salt=self.cache_salt,
        )

    def take(self, event: Event) -> None:
        self.ended = self.ended or event.last
        if not self.finished:
            self.values, self.error, self.metrics = event.pooled, event.error, event.metrics
            if event.last and not self.finished:
                self.error = RequestError("The engine gave no pooled output")
            self.changed.set()

    def fail(self, error: Exception) -> None:
        self.ended = True
        if not self.finished:
            self.error = error
        self.changed.set()
