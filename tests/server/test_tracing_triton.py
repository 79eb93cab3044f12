"""Protects that Triton's requests are traced: by the engine's process, below the span of the client,
whichever model and protocol it asks.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx2
import pytest
import tritonclient.grpc as grpc
from otlp_collector import PARENT, TRACE, Collector
from servers import World, fill_repo, served
from test_server import tensor
from test_text_models import ONE, texts
from waiting import wait_for


@pytest.mark.extended
def test_traceparent_comes_through_every_model(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.grpc.replace("grpc", "http"))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    parent = f"00-{TRACE}-{PARENT}-01"
    catalog = tmp_path / "catalog"
    shutil.copytree(world.adapters[3], catalog / "three")
    given = {"lora_catalog_dir": str(catalog), "decoupled_mode": "False"}
    repo = fill_repo(tmp_path / "models", world.model, contracts=True, **given)
    with served(repo) as server:
        before = len(collector.spans)  # the launcher asks, too
        body = {"text_input": "a", "max_tokens": 4, "lora_name": "three", "traceparent": parent}
        own = {"text_input": "a", "sampling_parameters": '{"max_tokens": 4}', "traceparent": parent}
        url = f"http://127.0.0.1:{server.http}/v2/models"
        with httpx2.Client(timeout=60) as client:
            for model, given in (("ensemble", body), ("tensorrt_llm_bls", body), ("vllm_model", own)):
                answer = client.post(f"{url}/{model}/generate", json=given)
                assert answer.status_code == 200, answer.text
        with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as asked:
            sent = [tensor("text_input", texts(b"a")), tensor("max_tokens", ONE)]
            asked.infer("ensemble", sent, parameters={"traceparent": parent})
            asked.infer("ensemble", sent, headers={"traceparent": parent})

        def ours() -> list[dict]:
            return [one for one in collector.spans[before:] if one["span"].parent_span_id.hex() == PARENT]

        wait_for(lambda: len(ours()) == 5)
    collector.close()
    names = sorted(one["name"] for one in ours())
    assert names == ["text_completion tensorrt_llm"] * 3 + ["text_completion three"] * 2
    for one in ours():
        assert one["span"].trace_id.hex() == TRACE and one["gen_ai.usage.output_tokens"] == 4
        parts = [part for part in collector.spans if part["span"].parent_span_id == one["span"].span_id]
        assert [part["name"] for part in parts if part["name"] != "adapter_load"] == [
            "queue",
            "prefill",
            "decode",
        ]
    cold = [one for one in ours() if one.get("manylora.latency.adapter_load", 0) > 0]
    assert len(cold) == 1 and cold[0]["manylora.adapter.name"] == "three"
