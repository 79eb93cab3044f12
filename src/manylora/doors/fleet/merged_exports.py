"""Merges what several replicas export: their metrics, with a label, and the data of the status page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from manylora.doors.fleet.member import RemoteResponse
from manylora.doors.http.serving.metrics import POINT_S

SUMS = ("tokens_per_s", "requests_per_s", "running", "waiting")
PER_SECOND = ("tokens_per_s", "requests_per_s")
TIMES = ("ttft_p50_ms", "ttft_p95_ms", "latency_p50_ms", "latency_p95_ms")


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge Prometheus texts by replica. Every sample gets the label `replica`."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family, label = "", f'replica="{replica}"'
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                if "{" in line:
                    own, _, value = line.rpartition("}")
                    line = f"{own},{label}}}{value}"
                else:
                    name, _, value = line.partition(" ")
                    line = f"{name}{{{label}}} {value}"
                samples.setdefault(family, []).append(line)
    families = ([*head, *samples.get(family, ())] for family, head in heads.items())
    return "".join("\n".join(lines) + "\n" for lines in families)


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
    replicas = []
    for name, body in sorted(bodies.items()):
        counts.update(body["counts"])
        held = [
            {**_pick(one, "id", "name", "who"), "level": "device" if one["device"] else "host"}
            | _pick(one, "in_use")
            for one in body["adapters"]
        ]
        own = _pick(reports[name], "pid", "capacity", "running", "waiting")
        replicas.append({"replica": name, **own, "counts": body["counts"], "adapters": held})
    recent = [body["last_minute"] for body in bodies.values()]
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
        "last_minute": _merged(recent, PER_SECOND),
        "states": dict(states),
        "replicas": replicas,
    }


def _points(lists: Sequence[Sequence[Mapping[str, Any]]], last: int, after: int) -> list[dict[str, Any]]:
    """The replicas' points as one list, oldest first. Each list ends now, whenever its replica started."""
    found = []
    for age in range(min(max(map(len, lists), default=0), max(0, last - after)) - 1, -1, -1):
        same = [points[-1 - age] for points in lists if age < len(points)]
        found.append({"number": last - age, **_merged(same, SUMS)})
    return found


def _merged(points: Sequence[Mapping[str, Any]], sums: Sequence[str]) -> dict[str, Any]:
    """The sums of several points, and the slowest of their times, because these cannot be combined; None:
    there are none."""
    found: dict[str, Any] = {name: round(sum(one[name] for one in points), 2) for name in sums}
    for name in TIMES:
        found[name] = max((one[name] for one in points if one[name] is not None), default=None)
    return found


def _pick(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}
