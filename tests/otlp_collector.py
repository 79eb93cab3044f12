"""A stand-in for an OpenTelemetry collector. Skips the tests that import it without the extra `otel`."""

from __future__ import annotations

import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http", reason="traces are not tested: pip install 'manylora[otel]'"
)
import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes OTLP on two loopback ports. spans: by name; attributes are a dictionary."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                take(request)
                return trace_service_pb2.ExportTraceServiceResponse()

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self._grpc = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), self._grpc)
        self.grpc = f"grpc://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self.http = f"http://127.0.0.1:{self._http.server_port}/v1/traces"
        self._grpc.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._grpc.stop(0)

    def _take(self, request: Any) -> None:
        for resource in request.resource_spans:
            service = {one.key: one.value.string_value for one in resource.resource.attributes}[
                "service.name"
            ]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {one.key: _value(one.value) for one in span.attributes}
                    self.spans.append({"span": span, "name": span.name, "service": service, **values})


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found
