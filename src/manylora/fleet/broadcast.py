"""A call to all replicas, and which of them did not answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from manylora.fleet.remote_http import RemoteRequest, RemoteResponse
from manylora.fleet.router import FleetRouter
from manylora.openai.api.errors import ApiError

ALL_S = 5.0  # for all replicas to answer: half of Prometheus's timeout
LOOK_S = 0.25


@dataclass(frozen=True)
class Answers:
    """reports: from `ServerReplica.record_routing_stats`, by replica. missing: names of replicas that did not
    answer in time.
    """

    answers: list[RemoteResponse]
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def refused(self) -> RemoteResponse | None:
        """A response that is not a success. All replicas judge a request and its key in the same way."""
        return next((one for one in self.answers if one.status != 200), None)


async def ask_all(replicas: DeploymentHandle, call: RemoteRequest) -> Answers:
    """Wait for all replicas, at most ALL_S. Raises ApiError if none answers."""
    given, missing = await call_all(replicas, "whole_answer", call)
    if not given:
        raise ApiError(503, "engine_unavailable", "No replica answers at the moment", retry_after=1)
    reports = {name: report for name, (_, report) in given.items()}
    return Answers([one for one, _ in given.values()], reports, missing)


async def call_all(
    replicas: DeploymentHandle, method: str, *arguments: Any, longest_s: float = ALL_S
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The answer of each replica by its name, which the method returns with it, and the replicas that did not
    answer within longest_s. After ALL_S, replicas that no longer report are not waited for.
    """
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
