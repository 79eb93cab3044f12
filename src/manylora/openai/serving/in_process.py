"""InProcessEngine: an engine in this process, as an EngineClient."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from manylora.engine.engine import Engine
from manylora.engine.loop import EngineLoop
from manylora.openai.serving.backend import Wake

WATCH_S = 0.25
STALLED_S = 30.0  # time without progress after which the engine is not ready


class InProcessEngine:
    """Starts the engine's thread, which `close` stops. ended: called once, from another thread, with the
    reason why it died or made no progress for hang_s (0: no limit). Open requests have failed by then.
    """

    follows = True

    def __init__(
        self, engine: Engine, hang_s: float = 0.0, ended: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._wake: Wake = lambda: None
        self._loop = loop = EngineLoop(engine, lambda: self._wake())
        self.resident = engine.is_resident
        self.submit, self.cancel, self.publish = loop.submit, loop.cancel, loop.publish
        self.stats, self.cache_map = loop.stats, loop.cache_map
        self.pins = loop
        self._hang_s, self._ended = hang_s, ended
        self._stalled_s = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="manylora-watch", daemon=True).start()

    def _watch(self) -> None:
        while self._loop.death is None:
            if self._closed.wait(WATCH_S):
                return
            # Time in which this thread was stopped too, as when the process is suspended, does not count.
            self._stalled_s = min(self._loop.stalled_s, self._stalled_s + 2 * WATCH_S)
            if self._hang_s and self._stalled_s >= self._hang_s:
                self._loop.fail(f"it has not moved for {self._stalled_s:.0f} s")
        self._ended(str(self._loop.death))

    def on_events(self, wake: Wake) -> None:
        self._wake = wake

    @property
    def alive(self) -> bool:
        return self._loop.alive and self._stalled_s < STALLED_S

    async def close(self) -> None:
        self._closed.set()
        await asyncio.get_running_loop().run_in_executor(None, self._loop.close, False)
