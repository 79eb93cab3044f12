"""One server of a fleet, called by the front with HTTP requests as data; the response to a change that all
servers have followed; and what several replicas export, as one: metrics, and status. Does not need Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from manylora.adapters.catalog.shared import SharedAdapters, State
from manylora.doors.http.adapter_routes import RECEIVED, deleted, unloaded
from manylora.doors.http.api.errors import as_api_error
from manylora.doors.http.serving.metrics import POINT_S
from manylora.doors.http.serving.transport import error_response
from manylora.errors import RequestError

FOLLOW_S = 10.0  # to wait for an adapter change that this server has not seen yet
LEAVE_S = 5.0  # for an application to notice that its client has left, before it is cancelled
COPIED = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")


@dataclass(frozen=True)
class RemoteRequest:
    """scope: the serialisable part of the ASGI scope. body: complete. revision: of the adapter record, which
    the response must take into account. received: the file that the body was written to; "": none."""

    scope: dict[str, Any]
    headers: list[tuple[bytes, bytes]]
    body: bytes
    revision: int = 0
    received: str = ""

    @classmethod
    def of(
        cls, request: Request, body: bytes | bytearray = b"", revision: int = 0, received: str = ""
    ) -> RemoteRequest:
        scope = {name: request.scope[name] for name in COPIED if name in request.scope}
        return cls(scope, list(request.scope["headers"]), bytes(body), revision, received)


async def answer(app: ASGIApp, call: RemoteRequest) -> AsyncIterator[list[Message]]:
    """The ASGI messages of its response, in batches of all that are available. If the iterator is closed
    early, the application sees that the client disconnected."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            own = {"type": "http", "headers": call.headers, RECEIVED: call.received}
            await app({**call.scope, **own}, receive, messages.put)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        last = False
        while not last:
            found = [await messages.get()]
            while not messages.empty():
                found.append(messages.get_nowait())
            last = found[-1] is None
            if news := [one for one in found if one is not None]:
                yield news
        await task
    finally:
        gone.set()
        if not task.done():
            await asyncio.wait({task}, timeout=LEAVE_S)
            task.cancel()


async def whole_answer(app: ASGIApp, call: RemoteRequest) -> Response:
    found, body = Response(status_code=500), bytearray()
    async for messages in answer(app, call):
        for one in messages:
            if one["type"] == "http.response.start":
                found.status_code, found.raw_headers = one["status"], list(one["headers"])
            else:
                body += one.get("body", b"")
    found.body = bytes(body)
    return found


@dataclass(frozen=True)
class Changed:
    """The change made by a request. name: "": no change. revision: of the record after it."""

    answer: Response
    name: str
    revision: int


class Member:
    """app: of `manylora serve`, already running. name: of this server among the others."""

    def __init__(self, app: Starlette, name: str) -> None:
        self._app, self._name = app, name
        self._shared: SharedAdapters | None = app.state.routes.context.shared

    async def answer(
        self, call: RemoteRequest, *, adapter: str | None = None
    ) -> AsyncIterator[list[Message]]:
        """adapter: used by the router, which chose this server by it."""
        await self._follow(call)
        async for messages in answer(self._app, call):
            for one in messages:
                if one["type"] == "http.response.start":
                    one["headers"] = [*one["headers"], (b"x-manylora-replica", self._name.encode())]
            yield messages

    async def whole_answer(self, call: RemoteRequest) -> Response:
        await self._follow(call)
        return await whole_answer(self._app, call)

    async def change(self, call: RemoteRequest) -> Changed:
        """The response to a request that may change adapters. The other servers have not followed yet."""
        assert self._shared is not None
        try:
            async with self._shared.changing():
                found = await whole_answer(self._app, call)
                name = self._shared.changed
            return Changed(found, name, self._shared.revision)
        except RequestError as error:
            return Changed(error_response(as_api_error(error)), "", self._shared.revision)

    async def look(self, name: str, revision: int, drain_s: float) -> tuple[str, State]:
        """Follow the record, then tell what the name means, after this server's own name. drain_s: for
        requests of an unloaded adapter."""
        assert self._shared is not None
        try:
            await self._shared.look(revision)
            return self._name, await self._shared.state(name, drain_s)
        except Exception as error:
            return self._name, State(self._shared.revision, problem=as_api_error(error).message)

    async def _follow(self, call: RemoteRequest) -> None:
        if self._shared is not None and call.revision > self._shared.revision:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._shared.look(call.revision), FOLLOW_S)


def change_response(
    changed: Changed, method: str, path: str, states: Mapping[str, State], missing: Sequence[str]
) -> Response:
    """The first server's response, with the others' states. 202 if not all have followed; it names those.

    states: by replica. missing: replicas that have not answered. The others follow as soon as they can.
    """
    first = changed.answer
    status, told = first.status_code, bytes(first.body)
    if status < HTTPStatus.BAD_REQUEST and changed.name:
        late = dict.fromkeys(missing, "it has not answered in time") | {
            replica: state.problem or "it does not know of the change yet"
            for replica, state in states.items()
            if state.problem or state.revision < changed.revision
        }
        if method == "DELETE" or "/unload_" in path:
            running = sum(state.running for state in states.values())
            response = (deleted if method == "DELETE" else unloaded)(changed.name, running)
            status, told = response.status_code, bytes(response.body)
        status = HTTPStatus.ACCEPTED if late else status
        having = sorted(states.keys() - late.keys())
        if method in ("PUT", "DELETE"):
            told = json.dumps(json.loads(told) | {"replicas": having, "late": late}).encode()
        else:
            versions = {(states[one].version, states[one].digest) for one in having if states[one].digest}
            which = "".join(f", version {number}, digest {digest}" for number, digest in sorted(versions))
            lines = [told.decode(), f"On {len(having)} replica{'' if len(having) == 1 else 's'}{which}."]
            lines += [f"Not yet on replica {replica}: {reason}" for replica, reason in sorted(late.items())]
            told = "\n".join(lines).encode()
    merged = Response(told, status)
    kept = [one for one in first.raw_headers if one[0] != b"content-length"]
    merged.raw_headers = [*kept, (b"content-length", str(len(told)).encode())]
    return merged


SUMS = ("tokens_per_s", "requests_per_s", "running", "waiting")
PER_SECOND = ("tokens_per_s", "requests_per_s")
TIMES = ("ttft_p50_ms", "ttft_p95_ms", "latency_p50_ms", "latency_p95_ms")


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge Prometheus texts by replica. Every sample gets the label `replica`."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family, label = "", f'replica="{replica}"'
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                if "{" in line:
                    own, _, value = line.rpartition("}")
                    line = f"{own},{label}}}{value}"
                else:
                    name, _, value = line.partition(" ")
                    line = f"{name}{{{label}}} {value}"
                samples.setdefault(family, []).append(line)
    families = ([*head, *samples.get(family, ())] for family, head in heads.items())
    return "".join("\n".join(lines) + "\n" for lines in families)


def fleet_status(
    answers: Mapping[str, tuple[Response, dict[str, Any]]],
    states: Mapping[str, int],
    now: float,
    points_after: int = 0,
) -> dict[str, Any]:
    """The body of GET /v1/cache in a fleet. There is no single map; `replicas` says what each replica holds.

    answers: of GET /v1/cache from each replica, with the names that the request's key may see, and its
    report. states: number of replicas by Ray's name of their state. now: seconds since 1970. Points are
    numbered by it, so that all endpoints of a fleet use the same numbers.
    """
    bodies = {name: json.loads(bytes(one.body)) for name, (one, _) in sorted(answers.items())}
    counts: Counter[str] = Counter()
    replicas = []
    for name, body in bodies.items():
        counts.update(body["counts"])
        held = [
            {**_pick(one, "id", "name", "who"), "level": "device" if one["device"] else "host"}
            | _pick(one, "in_use")
            for one in body["adapters"]
        ]
        own = _pick(answers[name][1], "pid", "capacity", "running", "waiting")
        replicas.append({"replica": name, **own, "counts": body["counts"], "adapters": held})
    recent = [body["last_minute"] for body in bodies.values()]
    return {
        "object": "cache",
        "feed": "fleet",
        "mapped": False,
        "page_bytes": 0,
        "levels": None,
        "adapters": [],
        "changes": [],
        "last_change": 0,
        "counts": dict(counts),
        "point_seconds": POINT_S,
        "points": _points([body["points"] for body in bodies.values()], int(now // POINT_S), points_after),
        "last_minute": _merged(recent, PER_SECOND),
        "states": dict(states),
        "replicas": replicas,
    }


def _points(lists: Sequence[Sequence[Mapping[str, Any]]], last: int, after: int) -> list[dict[str, Any]]:
    """The replicas' points as one list, oldest first. Each list ends now, whenever its replica started."""
    found = []
    for age in range(min(max(map(len, lists), default=0), max(0, last - after)) - 1, -1, -1):
        same = [points[-1 - age] for points in lists if age < len(points)]
        found.append({"number": last - age, **_merged(same, SUMS)})
    return found


def _merged(points: Sequence[Mapping[str, Any]], sums: Sequence[str]) -> dict[str, Any]:
    """Sums of several points, and the slowest of their times, which cannot be added; None: there are none."""
    found: dict[str, Any] = {name: round(sum(one[name] for one in points), 2) for name in sums}
    for name in TIMES:
        found[name] = max((one[name] for one in points if one[name] is not None), default=None)
    return found


def _pick(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}
