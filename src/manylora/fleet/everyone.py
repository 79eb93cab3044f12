"""Everyone: one call that every replica answers, and which of them have not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from manylora.fleet.calls import Answer, Call
from manylora.fleet.router import FleetRouter
from manylora.openai.api.errors import ApiError

ALL_S = 5.0  # for all replicas to answer: half of what Prometheus waits for


@dataclass(frozen=True)
class Everyone:
    """reports: of `ServerReplica.record_routing_stats`, by replica. missing: names of those that have not
    answered in time."""

    answers: list[Answer]
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def refused(self) -> Answer | None:
        """One that is not a success: replicas judge a request and its key alike."""
        return next((one for one in self.answers if one.status != 200), None)


async def ask_everyone(replicas: DeploymentHandle, call: Call) -> Everyone:
    """Wait for all, but for none longer than ALL_S. Raises ApiError when nobody answers."""
    try:
        response = replicas.broadcast("whole_answer", call)
        # Its public `results_async` gives nothing when one is late.
        results = await asyncio.wait_for(response._fetch_replica_results_async(), ALL_S)
    except (DeploymentUnavailableError, TimeoutError, asyncio.TimeoutError):
        results = []
    known = FleetRouter.names
    tasks = {asyncio.ensure_future(one.get_async()): one for one in results}
    done, late = await asyncio.wait(tasks, timeout=ALL_S) if tasks else (set(), set())
    for task in late:
        task.cancel()
        tasks[task].cancel()
    given = [task.result() for task in done if task.exception() is None]
    if not given:
        raise ApiError(503, "engine_unavailable", "No replica answers at the moment", retry_after=1)
    reports = {one.replica: report for one, report in given}
    missing = sorted(known - reports.keys())
    return Everyone([one for one, _ in given], reports, tuple(missing))
