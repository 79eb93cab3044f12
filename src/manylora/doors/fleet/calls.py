"""Calls of replicas: which one Ray asks, how its response is forwarded, and calls to all of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from manylora.doors.fleet.member import RemoteRequest
from manylora.doors.fleet.routing import AffinityRouting, Replica, Reports
from manylora.doors.http.api.errors import ApiError, client_left

NOT_TAKEN = (BackPressureError, DeploymentUnavailableError)
LOST = (RayActorError, WorkerCrashedError, ObjectLostError)
TRIES = 5  # lost replicas after which a request fails
ALL_S = 5.0  # for all replicas to answer: half of Prometheus's timeout
LOOK_S = 0.25
RETRIED = "manylora_fleet_retried_requests_total"
CUT = "manylora_fleet_cut_streams_total"


class FleetRouter(RequestRouter):
    """Applies our routing policy to the replicas' reports. One instance per process that sends requests, on
    that process's routing thread. Created by Ray.

    names: of the existing replicas, for other threads of the process. silent: those that stopped reporting.
    """

    names: ClassVar[frozenset[str]] = frozenset()
    silent: ClassVar[frozenset[str]] = frozenset()

    def initialize_state(self, pinned: Mapping[str, int], target: float | None, silent_s: float) -> None:
        """Called by Ray with `request_router_kwargs`. target: autoscaling's target of requests per replica. A
        replica with more is full; else new ones would get no adapters from others. silent_s: of `Reports`."""
        self._target = target
        self._reports = Reports(silent_s)
        self._routing = AffinityRouting(pinned)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray with every report."""
        super().update_replicas(replicas)
        numbers = {one.replica_id.unique_id: one.routing_stats.get("number", -1) for one in replicas}
        self._reports.note(numbers, time.monotonic())
        FleetRouter.names, FleetRouter.silent = frozenset(numbers), self._reports.silent

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in order of preference, silent ones last. Ray takes the first one with room."""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        states = [self._state(name, one) for name, one in by_name.items()]
        order = self._routing.choose(_adapter(pending_request), states, time.monotonic())
        silent = self._reports.silent
        return [[by_name[one.name]] for one in sorted(order, key=lambda one: one.name in silent)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._routing.sent(_adapter(pending_request), replica_id.unique_id, time.monotonic())

    def _state(self, name: str, one: RunningReplica) -> Replica:
        report = one.routing_stats
        # Ray counts requests sent from here since the last report.
        requests = self.replica_queue_len_cache.get(one.replica_id)
        if requests is None:
            requests = report.get("running", 0) + report.get("waiting", 0)
        capacity = report.get("capacity") or one.max_ongoing_requests
        if self._target is not None:
            capacity = max(1, min(capacity, int(self._target)))
        return Replica(
            name,
            capacity,
            min(requests, capacity),
            max(0, requests - capacity),
            frozenset(report.get("device", ())),
            frozenset(report.get("host", ())),
        )


def _adapter(pending_request: PendingRequest | None) -> str | None:
    return None if pending_request is None else pending_request.kwargs.get("adapter")


class Relay(Response):
    """Forwards a replica's response. If the replica is lost before the response starts, another one is asked.

    on_end: called once, after the last byte or when the client has left.
    """

    COUNTERS: ClassVar[dict[str, str]] = {
        RETRIED: "Requests that were given to another replica, since theirs was lost",
        CUT: "Streams that ended with an error event, since their replica was lost",
    }

    def __init__(
        self, replicas: DeploymentHandle, call: RemoteRequest, adapter: str | None, counts: Counter[str]
    ) -> None:
        super().__init__()
        self._method = replicas.options(method_name="answer", stream=True)
        self._call, self._adapter, self._counts = call, adapter, counts
        self._answer: DeploymentResponseGenerator[list[Message]] | None = None
        self._begun: list[Message] = []
        self._left = False
        self.on_end: Callable[[], None] = lambda: None

    def leave(self) -> None:
        self._left = True
        if self._answer is not None:
            self._answer.cancel()

    async def begin(self) -> None:
        """Wait for the body's start. Until then another replica can still answer. Raises ApiError."""
        for attempt in range(TRIES):
            self._begun = []
            try:
                self._answer = self._method.remote(self._call, adapter=self._adapter)
                if self._left:
                    self._answer.cancel()
                while not any(one["type"] == "http.response.body" for one in self._begun):
                    self._begun += await anext(self._answer)
                return
            except LOST as error:
                if self._left:
                    raise client_left() from error
                if attempt < TRIES - 1:
                    self._counts[RETRIED] += 1
            except NOT_TAKEN as error:
                raise not_taken(error) from error
            except RequestCancelledError as error:
                raise client_left() from error
        raise not_taken()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._answer is not None
        try:
            for one in self._begun:
                await send(one)
            async for messages in self._answer:
                for one in messages:
                    await send(one)
        except LOST:
            if not self._left:
                self._counts[CUT] += 1
                await self._send_error(send)
        except RequestCancelledError:
            if not self._left:
                raise
        finally:
            self.on_end()

    async def _send_error(self, send: Send) -> None:
        """Report the error in the stream's format, so that a part is not taken for a whole answer."""
        headers = dict(self._begun[0]["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0]
        error = ApiError(503, "replica_lost", "The replica that answered has ended: send the request again")
        if kind == b"text/event-stream":
            end = error.event() + b"data: [DONE]\n\n"
        elif kind == b"application/x-ndjson":
            end = json.dumps({"error": error.message}).encode() + b"\n"
        else:
            raise RuntimeError(error.message)  # closes the connection before its length is reached
        await send({"type": "http.response.body", "body": end, "more_body": False})


def not_taken(error: Exception | None = None) -> ApiError:
    """The answer to a request that no replica took. error: one of NOT_TAKEN."""
    if isinstance(error, BackPressureError):
        text = "Too many requests wait for a replica, try again later"
        return ApiError(429, "overloaded", text, retry_after=1)
    text = "The fleet cannot answer at the moment, try again"
    return ApiError(503, "engine_unavailable", text, retry_after=1)


async def call_all(
    replicas: DeploymentHandle, method: str, *arguments: Any, longest_s: float = ALL_S
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The answer of each replica by its name, which the method returns with it, and the replicas that did not
    answer within longest_s. After ALL_S, replicas that no longer report are not waited for."""
    end, patient = time.monotonic() + longest_s, time.monotonic() + min(ALL_S, longest_s)
    try:
        response = replicas.broadcast(method, *arguments)
        # The public `results_async` returns nothing if one answer is late.
        results = await asyncio.wait_for(response._fetch_replica_results_async(), ALL_S)
    except (DeploymentUnavailableError, TimeoutError, asyncio.TimeoutError):
        results = []
    tasks = {asyncio.ensure_future(one.get_async()): one for one in results}
    given: dict[str, Any] = {}
    late: set[asyncio.Future[Any]] = set(tasks)
    while late and time.monotonic() < end:
        done, late = await asyncio.wait(late, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        given |= dict(task.result() for task in done if task.exception() is None)
        silent = FleetRouter.names - given.keys() <= FleetRouter.silent
        if time.monotonic() > patient and silent:
            break
    for task in late:
        task.cancel()
        tasks[task].cancel()
    return given, tuple(sorted(FleetRouter.names - given.keys()))
