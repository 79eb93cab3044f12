"""FleetRouter: a Ray Serve request router that applies our routing policy to the replicas' reports."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from manylora.fleet.routing import AffinityRouting, Replica, Reports


class RandomRouting:
    """For comparison: all replicas are equally preferred."""

    def choose(self, adapter: str | None, replicas: Sequence[Replica], now: float) -> list[Replica]:
        return random.sample(replicas, len(replicas))

    def sent(self, adapter: str | None, replica: str, now: float) -> None:
        pass


class FleetRouter(RequestRouter):
    """One instance per process that sends requests, on that process's routing thread. Created by Ray.

    names: of the existing replicas, for other threads of the process. silent: replicas that have stopped
    reporting.
    """

    names: ClassVar[frozenset[str]] = frozenset()
    silent: ClassVar[frozenset[str]] = frozenset()

    def initialize_state(
        self,
        routing: str = "affinity",
        pinned: Mapping[str, int] | None = None,
        target: float | None = None,
        silent_s: float = 5.0,
    ) -> None:
        """Called by Ray with `request_router_kwargs`. target: autoscaling's target of requests per replica. A
        replica with more counts as full; otherwise new replicas would not get adapters from the others.
        silent_s: of `Reports`.
        """
        self._target = target
        self._reports = Reports(silent_s)
        self._routing: AffinityRouting | RandomRouting = (
            RandomRouting() if routing == "random" else AffinityRouting(pinned=dict(pinned or {}))
        )

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
        """The replica has accepted the request."""
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
    """The adapter that a call of `ServerReplica.answer` is for."""
    return None if pending_request is None else pending_request.kwargs.get("adapter")
