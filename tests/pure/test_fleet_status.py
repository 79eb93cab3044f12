"""Protects the page of a fleet: its curves are those of all replicas together, whenever each began."""

from __future__ import annotations

import json
from typing import Any

from manylora.fleet.merged_exports import fleet_status
from manylora.fleet.remote_http import RemoteResponse

COUNTS = {"device": 1}
NOW = 2001.0


def point(number: int, tokens: float, waiting: int, slow: float | None) -> dict[str, Any]:
    times = dict.fromkeys(("ttft_p50_ms", "ttft_p95_ms", "latency_p50_ms", "latency_p95_ms"), slow)
    rates = {"tokens_per_s": tokens, "requests_per_s": 0.5, "running": 1, "waiting": waiting}
    return {"number": number, **rates, **times}


def status(replicas: dict[str, list[dict[str, Any]]], after: int = 0) -> dict[str, Any]:
    answers = []
    for name, points in replicas.items():
        last = {key: value for key, value in point(0, 1, 0, None).items() if key not in ("number", "running")}
        body = {"counts": COUNTS, "points": points, "last_minute": last, "adapters": []}
        answers.append(RemoteResponse(name, 200, [], json.dumps(body).encode()))
    report = {"pid": 1, "capacity": 4, "running": 0, "waiting": 0}
    return fleet_status(answers, dict.fromkeys(replicas, report), {"RUNNING": 2}, NOW, after)


def test_points_of_the_same_time_are_added_up() -> None:
    old = [point(number, 10.0, 2, 5.0) for number in range(41, 44)]
    young = [point(1, 3.5, 0, None), point(2, 4.5, 1, 9.0)]
    found = status({"a": old, "b": young})
    assert found["point_seconds"] == 2.0
    told = [
        (one["number"], one["tokens_per_s"], one["waiting"], one["ttft_p95_ms"]) for one in found["points"]
    ]
    assert told == [(998, 10.0, 2, 5.0), (999, 13.5, 2, 5.0), (1000, 14.5, 3, 9.0)]


def test_only_newer_points_are_given() -> None:
    points = [point(number, 1.0, 0, None) for number in range(5)]
    assert [one["number"] for one in status({"a": points}, 998)["points"]] == [999, 1000]
    assert status({"a": points}, 1000)["points"] == status({"a": points}, 10**9)["points"] == []
    assert status({"a": []})["points"] == status({})["points"] == []
