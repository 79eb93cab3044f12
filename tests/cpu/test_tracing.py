"""Protects the traces of requests: what a real OTLP collector would get, over HTTP and over gRPC."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator

import pytest
from otlp_collector import PARENT, TRACE, Collector
from serving import DEMO, Running

from manylora import cli
from manylora.system import tracing

PHASES = ("queue", "adapter_load", "prefill", "decode")


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def test_a_request_is_a_span_with_its_phases_below_the_clients(collector: Collector) -> None:
    with Running(lora_root=(DEMO / "adapters",), otlp_traces_endpoint=collector.http) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        body = {
            "model": "chinese",
            "messages": [{"role": "user", "content": "a"}],
            "temperature": 0.5,
            "seed": 1,
        }
        for _ in range(2):
            answer = server.http.post("/v1/chat/completions", json=body | {"max_tokens": 3}, headers=headers)
        assert server.post(model="demo", prompt="a", max_tokens=2, stream=True).status_code == 200
        failed = server.post("/v1/completions", model="chinese", prompt="a", load_lora_weights="never", n=2)
        assert failed.status_code == 200  # it is in the cache
        failed = server.post("/v1/completions", model="japanese", prompt="a", load_lora_weights="never")
        assert failed.status_code == 409
    cold, warm = (one for one in collector.spans if one["name"] == "chat chinese")
    usage = answer.json()["usage"]
    for one in (cold, warm):
        assert one["span"].trace_id.hex() == TRACE and one["span"].parent_span_id.hex() == PARENT
        assert one["span"].kind == one["span"].SPAN_KIND_SERVER and one["service"] == "manylora"
        assert one["gen_ai.operation.name"] == "chat" and one["gen_ai.request.id"] == "mine"
        assert one["gen_ai.request.model"] == one["gen_ai.response.model"] == "chinese"
        assert one["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert one["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert one["gen_ai.request.max_tokens"] == 3 and one["gen_ai.request.temperature"] == 0.5
        assert one["gen_ai.response.finish_reasons"] in (["stop"], ["length"])
        assert one["manylora.adapter.name"] == "chinese" and one["manylora.adapter.version"] == 1
        waited = one["gen_ai.latency.time_in_queue"]
        assert 0 <= waited < one["gen_ai.latency.time_to_first_token"] <= one["gen_ai.latency.e2e"]
        parts = [part for part in collector.spans if part["span"].parent_span_id == one["span"].span_id]
        names = [part["name"] for part in parts]
        assert names == [name for name in PHASES if one is cold or name != "adapter_load"]
        assert parts[0]["span"].start_time_unix_nano == one["span"].start_time_unix_nano
        for before, after in itertools.pairwise(parts):
            assert before["span"].end_time_unix_nano == after["span"].start_time_unix_nano
        assert parts[-1]["span"].end_time_unix_nano <= one["span"].end_time_unix_nano
    assert cold["manylora.latency.adapter_load"] > 0 and "manylora.latency.adapter_load" not in warm
    (plain,) = (one for one in collector.spans if one["name"] == "text_completion demo")
    assert not plain["span"].parent_span_id and "manylora.adapter.name" not in plain
    (refused,) = (one for one in collector.spans if one["name"] == "text_completion japanese")
    assert refused["http.response.status_code"] == 409 and refused["error.type"] == "409"
    assert refused["span"].status.code == refused["span"].status.STATUS_CODE_ERROR


def test_grpc_is_the_default_and_variables_say_the_rest(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "adapters")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.grpc.replace("grpc", "http"))
    with Running() as server:
        answer = server.http.post(
            "/v1/embeddings", json={"model": "demo", "input": "a"}, headers={"traceparent": "nonsense"}
        )
        assert answer.status_code == 200
    (one,) = (one for one in collector.spans if one["name"] == "embeddings demo")
    assert one["service"] == "adapters" and one["gen_ai.usage.output_tokens"] == 0
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with Running() as server:
        assert not server.app.state.routes.context.backend.on_finished


def test_an_endpoint_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given, words in (("http://:4317", "must be a URL"), ("http://a:b", "no valid port")):
        assert cli.main(["serve", str(DEMO / "base"), "--otlp-traces-endpoint", given]) == 1
        assert words in capsys.readouterr().err


def test_a_collector_that_does_not_answer_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)  # the SDK alone waits 10 s
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = tracing.Tracer(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        tracer.record({"gen_ai.operation.name": "chat", "gen_ai.request.model": "a"}, {}, 0.0, {})
        tracer.close()
        assert any(one.name == "manylora-traces" for one in threading.enumerate())
