"""Protects the page's routes and its feed: headers, the cache map, names that a key may not see."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving import Running
from waiting import wait_for

KEYS = {"boss": ["*"], "one": ["chinese"], "other": ["nothing-*"]}


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "adapters": adapters}
        for name, adapters in KEYS.items()
    ]
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": keys}), encoding="utf-8")
    running = Running(lora_root=(root,), api_keys=file)
    for adapter in ("chinese", "japanese", "chinese"):
        assert running.post(key="boss", model=adapter, prompt="a", max_tokens=4).status_code == 200
    yield running
    running.close()


def feed(server: Running, key: str = "boss", **query: Any) -> dict[str, Any]:
    answer = server.http.get("/v1/cache", params=query, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


def test_the_page_and_all_it_is_made_of_come_from_here_and_nothing_is_inline(server: Running) -> None:
    page = server.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "style=" not in page.text and "onclick" not in page.text and "//" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    names = {part.split('"')[0] for part in page.text.split('"page/')[1:]}
    assert names == {"icon.svg", "page.css", "page.js"}
    for name in [*names, "map.js", "ask.js", "api.js", "cache.js", "charts.js", "colours.js", "dom.js"]:
        found = server.http.get(f"/page/{name}")
        assert found.status_code == 200 and found.headers["x-content-type-options"] == "nosniff"
        assert "innerHTML" not in found.text and "eval(" not in found.text
        again = server.http.get(f"/page/{name}", headers={"If-None-Match": found.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["none.js", "../app.py", "..%2fapp.py", "%2e%2e%2fapp.py", "__init__.py"])
def test_no_other_file_can_be_had(server: Running, name: str) -> None:
    answer = server.http.get(f"/page/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_the_feed_tells_where_each_adapter_lies_and_what_happened(server: Running) -> None:
    told = feed(server)
    adapters = {one["name"]: one for one in told["adapters"]}
    assert set(adapters) == {"chinese", "japanese"}
    for level in ("device", "host"):
        pages = told["levels"][level]["pages"]
        taken = [page for one in told["adapters"] for first, end in one[level] for page in range(first, end)]
        assert len(taken) == len(set(taken)) >= 2
        assert all(0 <= page < pages for page in taken)
    assert (adapters["chinese"]["hits"], adapters["japanese"]["hits"]) == (1, 0)
    assert told["counts"]["hits"] == 1
    assert told["counts"]["cold_loads"] == told["counts"]["device_loads"] == 2
    happened = [(one["name"], one["level"], one["loaded"]) for one in told["changes"]]
    assert happened == [
        (name, level, True) for name in ("chinese", "japanese") for level in ("host", "device")
    ]
    assert [one["number"] for one in told["changes"]] == [1, 2, 3, 4]
    assert [one["number"] for one in feed(server, changes_after=3)["changes"]] == [4]


def test_the_last_minute_is_told_in_points(server: Running) -> None:
    wait_for(lambda: len(feed(server)["points"]) >= 2)
    told = feed(server)
    assert told["last_minute"]["tokens_per_s"] > 0
    assert 0 < told["last_minute"]["ttft_p50_ms"] <= told["last_minute"]["latency_p95_ms"]
    last = told["points"][-1]["number"]
    assert all(point["number"] > last for point in feed(server, points_after=last)["points"])


def test_a_key_sees_no_name_of_an_adapter_it_may_not_use(server: Running) -> None:
    ids = {}
    for key, seen in {"boss": {"chinese", "japanese"}, "one": {"chinese"}, "other": set()}.items():
        told = feed(server, key)
        assert {one["name"] for one in told["adapters"]} - {None} == seen
        assert {one["name"] for one in told["changes"]} - {None} == seen
        assert all((one["who"] == "named") == (one["name"] is not None) for one in told["adapters"])
        assert len(told["adapters"]) == 2
        ids[key] = {one["id"] for one in told["adapters"]}
    assert not ids["boss"] & ids["one"]
    text = str(feed(server, "one"))
    digests = {one["digest"] for one in models(server) if one["parent"]}
    assert "japanese" not in text and not any(digest[:12] in text for digest in digests)


def models(server: Running) -> list[dict[str, Any]]:
    return server.http.get("/v1/models", headers={"Authorization": "Bearer boss"}).json()["data"]


def test_a_stranger_sees_the_page_and_nothing_of_the_feed(server: Running) -> None:
    assert server.http.get("/").status_code == 200
    answer = server.http.get("/v1/cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
