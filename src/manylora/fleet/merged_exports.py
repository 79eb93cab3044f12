"""Merges what several replicas export: their metrics, with a label, and the data of the status page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from manylora.fleet.remote_http import RemoteResponse
from manylora.openai.serving.history import POINT_S

SUMS = ("tokens_per_s", "requests_per_s", "running", "waiting")
PER_SECOND = ("tokens_per_s", "requests_per_s")
TIMES = ("ttft_p50_ms", "ttft_p95_ms", "latency_p50_ms", "latency_p95_ms")


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge Prometheus texts by replica. Every sample gets the label `replica`."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, replica))
    return "".join(
        "\n".join([*head, *samples.get(family, ())]) + "\n" for family, head in heads.items()
    )  # fmt: skip


def _labelled(line: str, replica: str) -> str:
    label = f'replica="{replica}"'
    end = len(line) if "}" not in line else line.rindex("}")
    if "{" in line:
        return f"{line[:end]},{label}{line[end:]}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"


def fleet_status(
    answers: Sequence[RemoteResponse],
    reports: Mapping[str, dict[str, Any]],
    states: Mapping[str, int],
    now: float,
    points_after: int = 0,
) -> dict[str, Any]:
    """The body of GET /v1/cache in a fleet. There is no single map; `replicas` says what each replica holds.

    answers: of GET /v1/cache from each replica, with the names that the request's key may see. states: number
    of replicas by Ray's name of their state. now: seconds since 1970. Points are numbered by it, so that all
    endpoints of a fleet use the same numbers.
    """
    bodies = {one.replica: json.loads(one.body) for one in answers}
    counts: Counter[str] = Counter()
    for body in bodies.values():
        counts.update(body["counts"])
    recent = [body["last_minute"] for body in bodies.values()]
    last_minute: dict[str, float | None] = {
        name: round(sum(one[name] for one in recent), 2) for name in PER_SECOND
    }
    last_minute |= {name: _slowest(recent, name) for name in TIMES}
    return {
        "object": "cache",
        "feed": "fleet",
        "mapped": False,
        "page_bytes": 0,
        "levels": None,
        "adapters": [],
        "changes": [],
        "last_change": 0,
        "counts": dict(counts),
        "point_seconds": POINT_S,
        "points": _points([body["points"] for body in bodies.values()], int(now // POINT_S), points_after),
        "last_minute": last_minute,
        "states": dict(states),
        "replicas": [_replica(name, body, reports[name]) for name, body in sorted(bodies.items())],
    }


def _points(lists: Sequence[Sequence[Mapping[str, Any]]], last: int, after: int) -> list[dict[str, Any]]:
    """The replicas' points as one list, oldest first. Each list ends now, whenever its replica started."""
    found = []
    for age in range(min(max(map(len, lists), default=0), max(0, last - after)) - 1, -1, -1):
        same = [points[-1 - age] for points in lists if age < len(points)]
        point: dict[str, Any] = {"number": last - age}
        point |= {name: round(sum(one[name] for one in same), 2) for name in SUMS}
        point |= {name: _slowest(same, name) for name in TIMES}
        found.append(point)
    return found


def _slowest(points: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The slowest of several, because the values cannot be combined. None: there are none."""
    return max((one[name] for one in points if one[name] is not None), default=None)


def _replica(name: str, body: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    adapters = []
    for one in body["adapters"]:
        level = {"level": "device" if one["device"] else "host"}
        adapters.append({**_pick(one, "id", "name", "who"), **level, **_pick(one, "in_use")})
    own = _pick(report, "pid", "capacity", "running", "waiting")
    return {"replica": name, **own, "counts": body["counts"], "adapters": adapters}


def _pick(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}
