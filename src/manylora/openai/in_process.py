"""InProcessEngine: an engine loop in this process, as the backend wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from manylora.engine.engine import Engine
from manylora.loop import EngineLoop
from manylora.openai.backend import Wake
from manylora.request import Request, Sink
from manylora.stats import CacheMap, EngineStats

__all__ = ["InProcessEngine"]


class InProcessEngine:
    """Starts the engine's thread; `close` ends it and what is open."""

    def __init__(self, engine: Engine) -> None:
        self._adapters = engine.adapters
        self._wake: Wake = lambda: None
        self._loop = EngineLoop(engine, lambda: self._wake())

    def on_news(self, wake: Wake) -> None:
        self._wake = wake

    @property
    def alive(self) -> bool:
        return self._loop.alive

    def resident(self, task_id: int) -> bool:
        return self._adapters.resident(task_id)

    def submit(self, request: Request, sink: Sink) -> int:
        return self._loop.submit(request, sink)

    def cancel(self, ticket: int) -> None:
        self._loop.cancel(ticket)

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def cache_map(self, take: Callable[[CacheMap | None], None]) -> None:
        self._loop.cache_map(take)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._loop.close, False)
