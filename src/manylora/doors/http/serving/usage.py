"""What requests used: FinishedRequest, and UsageLog, which writes them as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from logging.handlers import QueueListener, WatchedFileHandler
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request

from manylora.doors.http.serving.backend import Backend, Call
from manylora.doors.http.serving.transport import request_id
from manylora.errors import ConfigError
from manylora.generation.generation import Generation
from manylora.system.tracing import HEADERS, Tracer

logger = logging.getLogger("manylora")

MAX_WAITING, CLOSE_S = 10_000, 5.0  # lines that may wait for the disk, and how long at the end
CHATS = "chat", "messages", "responses"  # parts of their paths


class Names(NamedTuple):
    """key: of the API key. model: that answers. asked: the model that was asked for."""

    key: str = ""
    model: str = ""
    asked: str = ""


@dataclass(frozen=True)
class FinishedRequest:
    """A request to the engine that has ended. status: of HTTP; 499: the client left. calls: per prompt."""

    request: Request
    status: int
    names: Names
    calls: tuple[Call[Any], ...]
    ended: float  # time.monotonic

    @property
    def tokens(self) -> tuple[int, int, int]:
        """Of prompts, those of them that were in the KV cache, and of outputs."""
        states = [call.generation for call in self.calls]
        cached = sum(one.metrics.cached_tokens for one in states if one.metrics is not None)
        return sum(len(one.prompt) for one in states), cached, sum(one.num_output for one in states)

    @cached_property
    def phases(self) -> dict[str, float]:
        """As `RequestMetrics.phases`, of the first prompt, with the time before the engine had it. Triton's
        clock is another one, so only differences of its times count.
        """
        call, metrics = self.calls[0], self.calls[0].generation.metrics
        found = {"queue": (call.admitted or self.ended) - call.arrived}
        if call.admitted:
            is_cold = bool(call.choice.adapters) and (metrics is None or metrics.adapter_tier != "device")
            read_s = (call.sent or self.ended) - call.admitted
            found["adapter_load" if is_cold else "queue"] = read_s + (0.0 if is_cold else found["queue"])
        for name, seconds in metrics.phases.items() if metrics is not None else ():
            found[name] = found.get(name, 0.0) + seconds
        if "prefill" in found and "decode" not in found:  # it has not ended
            found["decode"] = max(0.0, self.ended - call.arrived - sum(found.values()))
        return found

    def line(self) -> dict[str, Any]:
        """As JSON. Times are in seconds."""
        call, phases, version = self.calls[0], self.phases, self.calls[0].version
        prompt, cached, output = self.tokens
        first = sum(phases.values()) - phases["decode"] if "decode" in phases else None
        return {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "request_id": request_id(self.request),
            "route": self.request.url.path,
            "key": self.names.key,
            "model": self.names.model,
            "adapter": call.choice.name,
            "version": version.number if version is not None else None,
            "digest": call.content or None,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "completion_tokens": output,
            "status": self.status,
            "queue_seconds": round(phases["queue"], 6),
            "adapter_load_seconds": round(phases.get("adapter_load", 0.0), 6),
            "ttft_seconds": None if first is None else round(first, 6),
            "total_seconds": round(self.ended - call.arrived, 6),
        }

    def trace(self, tracer: Tracer) -> None:
        """Send it as a span."""
        call, generation, version = self.calls[0], self.calls[0].generation, self.calls[0].version
        request, route = self.request, self.request.url.path
        is_text, is_chat = isinstance(generation, Generation), any(part in route for part in CHATS)
        operation = "chat" if is_chat else "text_completion" if is_text else "embeddings"
        prompt, cached, output = self.tokens
        found: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": self.names.asked,
            "gen_ai.response.model": self.names.model,
            "gen_ai.request.id": request_id(request),
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.output_tokens": output,
            "gen_ai.usage.cache_read.input_tokens": cached,
            "manylora.key": self.names.key,
            "manylora.adapter.name": call.choice.name,
            "manylora.adapter.version": None if version is None else version.number,
            "manylora.adapter.digest": call.content or None,
            "manylora.adapter.tier": (generation.metrics and generation.metrics.adapter_tier) or None,
            "http.route": route,
            "http.response.status_code": self.status,
            "error.type": str(self.status) if self.status >= 400 else None,
        }
        if isinstance(generation, Generation):
            params, outputs = generation.decoding.params, generation.streamed_outputs
            found |= {
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.choice.count": len(outputs),
                "gen_ai.response.finish_reasons": [
                    one.finish_reason.value for one in outputs if one.finish_reason is not None
                ],
            }
        left = "The client has left" if self.status == 499 else None
        problem = next((one.error.message for one in self.calls if one.error is not None), left)
        parent = {name: request.headers[name] for name in HEADERS if name in request.headers}
        tracer.record(found, self.phases, self.ended - call.arrived, parent, problem)


def report(backend: Backend, calls: Sequence[Call[Any]], request: Request, status: int, names: Names) -> None:
    """Tell the usage log and the traces of calls that have ended. The fields are FinishedRequest's."""
    if backend.on_finished:
        done = FinishedRequest(request, status, names, tuple(calls), time.monotonic())
        for tell in backend.on_finished:
            tell(done)


class UsageLog:
    """Appends a line per request, on a thread of its own. A file that was renamed or deleted is made again,
    so it may be rotated; SIGHUP, which is often sent then, does nothing. Raises ConfigError if the file
    cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = _Lines(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"usage_log {path} cannot be written: {error.strerror}") from error
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING)
        self._writer = QueueListener(self._waiting, self._file)
        self._writer.start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    @property
    def num_dropped(self) -> int:
        return self._file.num_dropped

    def add(self, request: FinishedRequest) -> None:
        try:
            self._waiting.put_nowait(logging.makeLogRecord({"msg": json.dumps(request.line())}))
        except queue.Full:
            self._file.num_dropped += 1

    def close(self) -> None:
        """Write what waits, for some seconds."""
        last = threading.Thread(target=self._writer.stop, name="manylora-usage", daemon=True)
        last.start()
        last.join(CLOSE_S)


class _Lines(WatchedFileHandler):
    """num_dropped: lines that found no space when they came."""

    num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it was replaced: its space is free once it is closed, written or not
            self.handleError(record)
            with contextlib.suppress(OSError):
                self.close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not self.num_dropped:
            logger.error("lines of --usage-log are lost: %s", sys.exc_info()[1])
        self.num_dropped += 1
