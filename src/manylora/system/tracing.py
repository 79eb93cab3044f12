"""Tracer: sends spans of requests to an OpenTelemetry collector."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from manylora.errors import ConfigError
from manylora.version import __version__

logger = logging.getLogger("manylora")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP_PORT, HTTP_PATH = 4318, "/v1/traces"
CLOSE_S = 2.0  # the SDK would wait longer for a collector that does not answer
HEADERS = ("traceparent", "tracestate")
"""Of W3C's Trace Context: which span a request belongs to."""


def parent_in(parameters: str) -> dict[str, str]:
    """HEADERS among the parameters of a request to Triton. parameters: JSON, as given by Triton."""
    if "trace" not in parameters:  # fast path: most requests have none
        return {}
    given = json.loads(parameters)
    return {name: given[name] for name in HEADERS if isinstance(given.get(name), str)}


def is_traced(endpoint: str | None = None) -> bool:
    """Whether there is an endpoint, here or in OpenTelemetry's variables, and these do not disable traces."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    off = off or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    return not off and bool(endpoint or any(os.environ.get(name) for name in ENDPOINTS))


def open_tracer(endpoint: str | None = None) -> Tracer | None:
    """None unless `is_traced`. Raises ConfigError if the endpoint is given here and cannot be used."""
    if not is_traced(endpoint):
        return None
    try:
        return Tracer(endpoint)
    except ConfigError as error:
        if endpoint:
            raise
        logger.warning("%s is set, but there are no traces: %s", " or ".join(ENDPOINTS), error)
        return None


class Tracer:
    """endpoint: None: that of OpenTelemetry's variables. The SDK queues a bounded number of spans and sends
    them on a thread of its own; it reads its other variables itself. Any thread. Raises ConfigError.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = _exporter(endpoint)
        except ImportError as error:
            raise ConfigError(f"traces need {error.name}: pip install 'manylora[otel]'") from error
        resource = Resource.create({"service.name": "manylora"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("manylora", __version__)
        self._parent_of, self._trace = TraceContextTextMapPropagator().extract, trace

    def record(
        self,
        attributes: Mapping[str, Any],
        phases: Mapping[str, float],
        seconds: float,
        parent: Mapping[str, str],
        problem: str | None = None,
    ) -> None:
        """A request that has just ended. attributes: its operation and model at least; None is left
        out. phases: names and seconds of its parts, one after the other. seconds: of all of it. parent:
        the request's HEADERS. problem: why it failed.
        """
        trace, ended_ns = self._trace, time.time_ns()
        given = {"gen_ai.provider.name": "manylora", **attributes, **_latencies(phases, seconds)}
        given = {key: value for key, value in given.items() if value is not None}
        name = f"{given['gen_ai.operation.name']} {given['gen_ai.request.model']}"
        at_ns = ended_ns - int(seconds * 1e9)
        context, kind = self._parent_of(parent), trace.SpanKind.SERVER
        span = self._tracer.start_span(name, context, kind, given, start_time=at_ns)
        if not span.is_recording():
            return
        inside = trace.set_span_in_context(span)
        for phase, took_s in phases.items():
            part = self._tracer.start_span(phase, inside, start_time=at_ns)
            at_ns = min(at_ns + int(took_s * 1e9), ended_ns)
            part.end(at_ns)
        if problem is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, problem))
        span.end(ended_ns)

    def close(self) -> None:
        """Send what waits, for at most CLOSE_S."""
        last = threading.Thread(target=self._provider.shutdown, name="manylora-traces", daemon=True)
        last.start()
        last.join(CLOSE_S)


def _latencies(phases: Mapping[str, float], seconds: float) -> dict[str, float | None]:
    """Attributes under the names of vLLM and SGLang. seconds: of the whole request."""
    first = phases.get("prefill")
    before = sum(phases.get(name, 0.0) for name in ("queue", "adapter_load"))
    return {
        "gen_ai.latency.time_in_queue": phases.get("queue"),
        "gen_ai.latency.time_to_first_token": None if first is None else before + first,
        "gen_ai.latency.e2e": seconds,
        "gen_ai.latency.time_in_model_prefill": first,
        "gen_ai.latency.time_in_model_decode": phases.get("decode"),
        "manylora.latency.adapter_load": phases.get("adapter_load"),
    }


def _exporter(endpoint: str | None) -> Any:
    """For HTTP if a variable says so, or else the endpoint's port or path; for gRPC otherwise, as in vLLM."""
    url = endpoint or next(filter(None, map(os.environ.get, ENDPOINTS)))
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        is_http = parts.port == HTTP_PORT or bool(parts.path.strip("/"))
    except ValueError as error:
        raise ConfigError(f"otlp_traces_endpoint {url!r} has no valid port") from error
    if not parts.hostname:
        raise ConfigError(f"otlp_traces_endpoint {url!r} must be a URL, such as http://localhost:4317")
    protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "http/protobuf" if is_http else "grpc")
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        if endpoint is None:
            return HttpExporter()
        return HttpExporter(endpoint if parts.path.strip("/") else endpoint.rstrip("/") + HTTP_PATH)
    if protocol != "grpc":
        raise ConfigError(f"{PROTOCOLS[0]} must be grpc or http/protobuf, got {protocol!r}")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint, insecure=None if endpoint is None else parts.scheme != "https")
