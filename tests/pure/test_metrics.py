"""Protects what the metrics count: requests of users, not the launcher's own trial of the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.request import Event, FinishReason, RequestMetrics
from manylora.system.lifeline import RUN_DIR, STARTING_FILE
from manylora.wire.metrics import RequestMeter

FINISHED = Event(
    finish_reason=FinishReason.LENGTH,
    last=True,
    metrics=RequestMetrics(arrival_ns=0, prompt_tokens=3, output_tokens=5),
)


def counted(meter: RequestMeter) -> dict[str, float]:
    return {sample.family: sample.value for sample in meter.samples(None, FINISHED)}


def test_a_request_before_the_server_is_called_ready_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    (tmp_path / STARTING_FILE).touch()
    meter = RequestMeter()
    assert counted(meter) == {}
    (tmp_path / STARTING_FILE).unlink()
    assert counted(meter)["nv_llm_input_token_len"] == 3


def test_without_a_launcher_every_request_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_DIR, raising=False)
    assert counted(RequestMeter())["nv_llm_output_token_len"] == 5
