"""What requests used: FinishedRequest, and UsageLog, which writes them as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from starlette.requests import Request

from manylora.doors.http.serving.backend import Backend, Call
from manylora.doors.http.serving.transport import request_id
from manylora.errors import ConfigError
from manylora.generation.generation import Generation
from manylora.system.tracing import HEADERS, Tracer, latencies

logger = logging.getLogger("manylora")

MAX_WAITING = 10_000  # lines that may wait for the disk
AT_ONCE = 1000
OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "embed": "embeddings",
    "pool": "embeddings",
}
"""Names of GenAI's semantic conventions, by a part of the path; for others text_completion."""


@dataclass(frozen=True)
class FinishedRequest:
    """A request to the engine that has ended. name: the client's or ours. key: name of the API key. model:
    that answered. asked: the model that was asked for. status: of HTTP; 499: the client left. calls: one per
    prompt. parent: HEADERS of a trace.
    """

    name: str
    route: str
    key: str
    model: str
    asked: str
    status: int
    calls: tuple[Call[Any], ...]
    ended: float  # time.monotonic
    parent: Mapping[str, str]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(call.generation.prompt) for call in self.calls)

    @property
    def output_tokens(self) -> int:
        return sum(call.generation.num_output for call in self.calls)

    @property
    def cached_tokens(self) -> int:
        return sum(one.cached_tokens for call in self.calls if (one := call.generation.metrics))

    @cached_property
    def phases(self) -> dict[str, float]:
        """As `RequestMetrics.phases`, of the first prompt, with the time before the engine had it. Triton's
        clock is another one, so only differences of its times count.
        """
        call, metrics = self.calls[0], self.calls[0].generation.metrics
        found = {"queue": (call.admitted or self.ended) - call.arrived}
        if call.admitted:
            is_cold = bool(call.adapters) and (metrics is None or metrics.adapter_tier != "device")
            read_s = (call.sent or self.ended) - call.admitted
            found["adapter_load" if is_cold else "queue"] = read_s + (0.0 if is_cold else found["queue"])
        for name, seconds in metrics.phases.items() if metrics is not None else ():
            found[name] = found.get(name, 0.0) + seconds
        if "prefill" in found and "decode" not in found:  # it has not ended
            found["decode"] = max(0.0, self.ended - call.arrived - sum(found.values()))
        return found

    @property
    def first_token_s(self) -> float | None:
        """None: there was no token."""
        phases = self.phases
        return sum(phases.values()) - phases["decode"] if "decode" in phases else None

    def line(self) -> dict[str, Any]:
        """As JSON."""
        call, phases = self.calls[0], {name: round(value, 6) for name, value in self.phases.items()}
        first, version = self.first_token_s, call.version
        return {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "request_id": self.name,
            "route": self.route,
            "key": self.key,
            "model": self.model,
            "adapter": call.adapter,
            "version": version.number if version is not None else None,
            "digest": call.content or None,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.output_tokens,
            "status": self.status,
            "queue_seconds": phases["queue"],
            "adapter_load_seconds": phases.get("adapter_load", 0.0),
            "ttft_seconds": None if first is None else round(first, 6),
            "total_seconds": round(self.ended - call.arrived, 6),
        }

    def trace(self, tracer: Tracer) -> None:
        """Send it as a span."""
        call, generation = self.calls[0], self.calls[0].generation
        total_s, version = self.ended - call.arrived, call.version
        operation = next((name for part, name in OPERATIONS.items() if part in self.route), "text_completion")
        found: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "manylora",
            "gen_ai.request.model": self.asked,
            "gen_ai.response.model": self.model,
            "gen_ai.request.id": self.name,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "manylora.key": self.key,
            "manylora.adapter.name": call.adapter,
            "manylora.adapter.version": None if version is None else version.number,
            "manylora.adapter.digest": call.content or None,
            "manylora.adapter.tier": (generation.metrics and generation.metrics.adapter_tier) or None,
            "http.route": self.route,
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
        found |= latencies(self.phases, total_s)
        problem = next((one.error.message for one in self.calls if one.error is not None), None)
        problem = problem or ("The client has left" if self.status == 499 else None)
        tracer.record(f"{operation} {self.asked}", found, self.phases, total_s, self.parent, problem)


def report(
    backend: Backend,
    calls: Sequence[Call[Any]],
    request: Request,
    status: int,
    key: str,
    model: str,
    asked: str,
) -> None:
    """Tell the usage log and the traces of calls that have ended. The fields are FinishedRequest's."""
    if backend.on_finished:
        parent = {name: request.headers[name] for name in HEADERS if name in request.headers}
        name, route, ended = request_id(request), request.url.path, time.monotonic()
        done = FinishedRequest(name, route, key, model, asked, status, tuple(calls), ended, parent)
        for tell in backend.on_finished:
            tell(done)


class UsageLog:
    """Appends a line per request on a thread of its own. A file that was renamed or deleted is made again, so
    it may be rotated; SIGHUP, which is often sent then, does nothing. Lines that find no space are dropped
    and counted. Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.num_dropped = path, 0
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"usage_log {path} cannot be written: {error.strerror}") from error
        self._torn = self._told = False
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="manylora-usage", daemon=True)
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def add(self, request: FinishedRequest) -> None:
        try:
            self._lines.put_nowait(request.line())
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=1)
        self._thread.join(5)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)

    def _run(self) -> None:
        ended = False
        while not ended:
            lines = [self._lines.get()]
            while len(lines) < AT_ONCE and not self._lines.empty():
                lines.append(self._lines.get())
            ended = None in lines
            found = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines if line is not None]
            try:
                self._write("".join(found).encode(errors="replace"))
            except OSError as error:
                self.num_dropped += len(found)
                if not self._told:
                    logger.error("lines of --usage-log are lost: %s", error.strerror)
                self._told = True
            else:
                self._told = False
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        """Raises OSError."""
        try:
            same = os.path.samestat(os.stat(self._path), os.fstat(self._file))  # noqa: PTH116
        except FileNotFoundError:
            same = False
        if not same:
            old, self._file, self._torn = self._file, self._open(), False
            os.close(old)
        data = (b"\n" if self._torn else b"") + data
        while data:
            written = os.write(self._file, data)
            self._torn = data[written - 1 : written] != b"\n"  # the disk may be full in the middle of a line
            data = data[written:]
