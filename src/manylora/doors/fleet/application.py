"""The Ray Serve application: the OpenAI server in each replica, and on a cluster the endpoint in front."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from itertools import count
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from manylora.doors.fleet.calls import FleetRouter
from manylora.doors.fleet.front import DEPLOYMENT, make_front
from manylora.doors.fleet.member import Member, RemoteRequest
from manylora.doors.fleet.options import FleetOptions, read_args
from manylora.doors.http.serving.backend import Backend
from manylora.doors.http.serving.logs import log_to_stderr

logger = logging.getLogger("manylora")

GONE_S = 0.5  # to send errors to open requests before a process with a dead engine exits
TARGET_REQUESTS = 16.0
SILENT_S, SILENT_REPORTS = 3.0, 3  # without reports for this long, a replica is asked last
LOGGING = {"log_level": "WARNING", "enable_access_log": False}


class ServerReplica(Member):
    """The server of `manylora serve` without HTTP. Its methods are called from other processes."""

    async def __init__(self, options: FleetOptions, threads: int | None = None) -> None:  # type: ignore[misc]
        """threads: of each of its ranks, if it has several."""
        if threads is not None:  # before the import of torch, which reads it once
            os.environ["OMP_NUM_THREADS"] = str(threads)
        from manylora.doors.http.server import open_app

        log_to_stderr(options.log_level)
        self._loop = asyncio.get_running_loop()
        app = open_app(options, self._end)
        self._running = contextlib.AsyncExitStack()
        await self._running.enter_async_context(app.router.lifespan_context(app))
        self._backend: Backend = app.state.routes.context.backend
        self._numbers = count()
        super().__init__(app, serve.get_replica_context().replica_id.unique_id)

    async def reported_answer(self, call: RemoteRequest) -> tuple[str, tuple[Response, dict[str, Any]]]:
        return self._name, (await self.whole_answer(call), self.record_routing_stats())

    def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray's controller, which passes the result to every router."""
        stats = self._backend.stats()
        residents = stats.adapters.residents
        return {
            "number": next(self._numbers),
            "capacity": stats.max_batch_size,
            "running": stats.running,
            "waiting": stats.waiting,
            "device": sorted({one.name for one in residents if one.on_device}),
            "host": sorted({one.name for one in residents if not one.on_device}),
            "pid": os.getpid(),
        }

    def check_health(self) -> None:
        """Called by Ray's controller. A replica that raises or does not answer is replaced."""
        if not self._backend.engine.alive:
            raise RuntimeError("the engine has stopped")

    def _end(self, reason: str) -> None:
        logger.critical("%s: this replica ends", reason)
        self._loop.call_soon_threadsafe(self._loop.call_later, GONE_S, os._exit, 1)


class Endpoint:
    """The front as a deployment, for a cluster: Ray's HTTP proxies send it every request."""

    def __init__(self, options: FleetOptions, replicas: DeploymentHandle) -> None:
        self._front = make_front(options, replicas)

    async def __call__(self, request: Request) -> Response:
        return _Passed(self._front)


class _Passed(Response):
    def __init__(self, app: Any) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


def replicas(options: FleetOptions, gpus: float) -> Application:
    scaling: dict[str, Any] = {"num_replicas": options.replicas}
    target = None
    if options.max_replicas is not None:
        target = options.target_requests or TARGET_REQUESTS
        scaling = {
            "autoscaling_config": {
                "min_replicas": options.least_replicas,
                "initial_replicas": options.replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": target,
                "upscale_delay_s": options.upscale_delay,
                "downscale_delay_s": options.downscale_delay,
            }
        }
    deployment = serve.deployment(
        name=DEPLOYMENT,
        max_ongoing_requests=options.replica_requests,
        max_queued_requests=options.max_queue_size or -1,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": gpus},
        health_check_period_s=2.0,
        health_check_timeout_s=7.0,  # Ray replaces a replica that is late three times in a row
        graceful_shutdown_timeout_s=options.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=2,  # wrong options will fail again
        logging_config=LOGGING,
        request_router_config={
            "request_router_class": FleetRouter,
            "request_router_kwargs": {
                "pinned": dict(options.pin),
                "target": target,
                "silent_s": max(SILENT_S, SILENT_REPORTS * options.report_seconds),
            },
            "request_routing_stats_period_s": options.report_seconds,
        },
        **scaling,
    )(ServerReplica)
    return deployment.bind(options, options.threads())


def build(args: dict[str, Any]) -> Application:
    """`import_path` of a Ray Serve configuration. args: as for `read_args`. Raises ConfigError."""
    options = read_args(args)
    endpoint = serve.deployment(
        name="Endpoint",
        max_ongoing_requests=10_000,  # each is a stream that mostly waits
        ray_actor_options={"num_cpus": 0.1},
        logging_config=LOGGING,
    )(Endpoint)
    return endpoint.bind(options, replicas(options, options.gpus(0)))
