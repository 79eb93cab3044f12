"""Protects the server from what it is told: hosts and origins of a browser that was led here, bodies that are
dear to read, names meant for the log; and from disks that take no more."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from serving import DEMO, Running
from starlette.requests import Request
from waiting import wait_for

from manylora.adapters.catalog import catalog, levels
from manylora.doors.http.api import parsing
from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.api.ollama_request import OllamaChat
from manylora.doors.http.api.params import guide_of
from manylora.doors.http.api.parsing import MAX_BRACKETS, MAX_COMMAS, MAX_ENTRIES, MAX_STRINGS, parse
from manylora.doors.http.api.schema import ChatRequest, CompletionRequest
from manylora.doors.http.serving.keys import HostCheck
from manylora.doors.http.serving.logs import PlainFormatter, RateLimit
from manylora.system import folders

MANY = {str(n): 1 for n in range(30000)}
LOAD = {"lora_name": "mine", "lora_path": "chinese", "load_inplace": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(
        lora_root=(DEMO / "adapters",), allow_runtime_lora_updating=True, allowed_hosts=("api.example.com",)
    ) as running:
        yield running


def request(host: str | None, origin: str | None = None, version: str = "1.1") -> Request:
    headers = [(b"host", one.encode()) for one in ([] if host is None else host.split("|"))]
    headers += [] if origin is None else [(b"origin", origin.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers, "http_version": version})


def test_a_name_that_was_turned_on_the_server_loads_nothing(server: Running) -> None:
    for headers in ({"Host": "rebound.example.net"}, {"Origin": "https://example.net"}, {"Origin": "null"}):
        answer = server.http.post("/v1/load_lora_adapter", json=LOAD, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert server.http.get("/v1/models", headers={"Host": "rebound.example.net"}).status_code == 403
    assert server.http.get("/health/ready", headers={"Host": "rebound.example.net"}).status_code == 200
    for headers in ({"Host": "api.example.com"}, {"Origin": "https://api.example.com"}, {}):
        answer = server.http.post("/v1/load_lora_adapter", json=LOAD, headers=headers)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "10.1.2.3:80", "gpu-box", "LOCALHOST.", "a.svc",
             "x.default.svc.cluster.local:8000", "mac.local", "app.localhost", "bound.example.org"],
)  # fmt: skip
def test_names_of_ones_own_network_are_taken(host: str) -> None:
    HostCheck("bound.example.org").check(request(host))


@pytest.mark.parametrize(
    "host", ["evil.com", "localhost.evil.com", "127.0.0.1.nip.io:8000", "a b", "", "x@y", "[::1"]
)
def test_other_names_are_not(host: str) -> None:
    with pytest.raises(ApiError, match="--allowed-hosts"):
        HostCheck("127.0.0.1").check(request(host))
    HostCheck("127.0.0.1", ["*"]).check(request(host))
    HostCheck("127.0.0.1", keys=True).check(request(host))
    with pytest.raises(ApiError, match="--allowed-hosts"):
        HostCheck("127.0.0.1", ["*.example.com"], keys=True).check(request(host))


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' + b'"' * (3 * MAX_STRINGS) + b"}",
        b'{"a":[' + b"1," * MAX_COMMAS + b"1,1]}",
        b'{"a":{' + b'"b":1,' * MAX_ENTRIES + b'"b":1}}',
        b'{"a":[' + b"{}," * MAX_BRACKETS + b"{}]}",
        b'{"a":["\\\\",' + b"[]," * MAX_BRACKETS + b'"\\""]}',
    ],
    ids=["texts", "numbers", "fields", "objects", "lists"],
)
def test_a_body_of_many_values_is_refused_before_any_is_made(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed, a megabyte of them held the event loop, and with it every other client, for seconds."""
    monkeypatch.delattr(parsing, "from_json")
    with pytest.raises(ApiError, match="too many parts") as error:
        parse(body, CompletionRequest)
    assert error.value.status == 413


def test_json_in_a_text_may_not_have_many_values_either() -> None:
    schema = json.dumps(dict.fromkeys(map(str, range(MAX_ENTRIES + 1))))
    with pytest.raises(ApiError, match="too many parts"):
        body = json.dumps({"prompt": "x", "guided_json": schema}).encode()
        guide_of(parse(body, CompletionRequest), None)


def test_a_text_may_have_as_many_commas_as_it_likes() -> None:
    for text in (',\\\\",[{' * (MAX_COMMAS + 1), ',\\\\\\",[{' * (MAX_COMMAS + 1)):
        raw = json.dumps({"prompt": text + "\\"}).encode()
        assert parse(raw, CompletionRequest).prompt == text + "\\"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [*[1] * 100000, "x"]}),
        (CompletionRequest, {"prompt": "x", **MANY}),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(MANY, "x")}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 10000}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tool_choice": MANY}),
        (OllamaChat, {"model": "x", "options": MANY}),
    ],
)
def test_the_first_of_many_wrong_values_ends_the_check(kind: Any, body: dict[str, Any]) -> None:
    """Gathered, they were gigabytes and minutes for one request."""
    with pytest.raises(ApiError) as error:
        parse(json.dumps(body).encode(), kind)
    cause = error.value.__cause__
    assert cause is None or (isinstance(cause, ValidationError) and cause.error_count() < 10)


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    stream, logger = io.StringIO(), logging.Logger("of a test")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter("%(levelname)s %(message)s"))
    handler.addFilter(RateLimit())
    logger.addHandler(handler)
    yield logger, stream


def test_a_name_forges_no_line_of_the_log(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    logger.warning("adapter %s", "a\nERROR forged\r\x1b[2J\u202e\u2028b")
    logger.warning("adapter %s", "x" * 100000)
    try:
        raise ValueError("c\nERROR forged")
    except ValueError:
        logger.exception("failed")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "WARNING adapter a\\nERROR forged\\r\\x1b[2J\\u202e\\u2028b"
    assert len(lines[1]) < 3000
    assert lines[2] == "ERROR failed" and all(line.startswith("    ") for line in lines[3:])


def test_a_client_does_not_flood_the_log() -> None:
    now = 0.0
    limit = RateLimit(burst=3, window_s=10.0, clock=lambda: now)
    lines = [logging.LogRecord("a", logging.WARNING, "a.py", 1, "no %s", ("b",), None) for _ in range(9)]
    assert [limit.filter(one) for one in lines[:8]] == [True] * 3 + [False] * 5
    now = 10.0
    assert limit.filter(lines[8])
    assert lines[8].getMessage() == "no b (5 more lines like it came before)"


def test_a_full_disk_costs_copies_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Adapters that come while it is full are read and served, also those that are found by the watch."""
    full = True
    save = levels.write_safetensors

    def save_file(*arguments: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments)

    monkeypatch.setattr(levels, "write_safetensors", save_file)
    monkeypatch.setattr(folders, "RETRY_S", 0.0)
    root, folder = tmp_path / "adapters", tmp_path / "copies"
    shutil.copytree(DEMO / "adapters" / "chinese", root / "one")
    failures = lambda: [one for one in caplog.messages if "copies cannot be written" in one]  # noqa: E731
    with Running(lora_root=(root,), lora_disk_dir=folder, drain_seconds=1.0) as server:
        assert server.post(model="one", prompt="a", max_tokens=2).status_code == 200
        shutil.copytree(DEMO / "adapters" / "japanese", root / "two")
        wait_for(lambda: server.http.get("/v1/models/two").status_code == 200)
        assert server.post(model="two", prompt="a", max_tokens=2).status_code == 200
        wait_for(lambda: bool(failures()))
        assert len(failures()) == 1
        full = False
        shutil.copytree(DEMO / "adapters" / "japanese", root / "three")
        (root / "one" / "adapter_config.json").touch()
        wait_for(lambda: any(folder.glob("*.safetensors")))
        wait_for(lambda: "lora disk level: copies can be written again" in caplog.messages)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("a small disk is mounted by root only")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_uploads_and_copies_on_a_disk_that_is_full(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Running(
        lora_root=(DEMO / "adapters",),
        lora_disk_dir=small_disk / "copies",
        lora_upload_dir=small_disk / "uploads",
        allow_runtime_lora_updating=True,
        drain_seconds=1.0,
    ) as server:
        assert server.post(model="chinese", prompt="a", max_tokens=2).status_code == 200
        wait_for(lambda: any("copies cannot be written" in one for one in caplog.messages))
        # Half a copy would fill the disk too.
        wait_for(lambda: not list((small_disk / "copies").iterdir()))
        headers = {"content-type": "application/octet-stream"}
        url = "/v1/load_lora_adapter?lora_name=mine"
        answer = server.http.post(url, content=b"x" * 200000, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
        shutil.rmtree(small_disk / "uploads" / ".incoming")
        answer = server.http.post(url, content=b"x" * 2000, headers=headers)
        assert answer.status_code == 422, answer.text
        assert not list((small_disk / "uploads" / ".incoming").iterdir())


def test_what_passes_is_tried_again_and_withdraws_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without descriptors, adapters were broken for good, or gone with a folder that could not be listed."""
    short, failed = False, list[Any]()
    real_find, real_read = catalog.find_adapters, catalog.AdapterReader.read

    def find_adapters(*arguments: Any) -> Any:
        if short:
            failed.append(arguments)
            raise OSError(errno.EMFILE, "Too many open files")
        return real_find(*arguments)

    def read(self: catalog.AdapterReader, *arguments: Any) -> Any:
        if short:
            raise OSError(errno.EMFILE, "Too many open files")
        return real_read(self, *arguments)

    monkeypatch.setattr(catalog, "find_adapters", find_adapters)
    monkeypatch.setattr(catalog.AdapterReader, "read", read)
    with Running(lora_root=(DEMO / "adapters",), lora_refresh_seconds=0.2, drain_seconds=1.0) as server:
        wait_for(lambda: server.http.get("/v1/models/chinese").status_code == 200)
        short = True
        wait_for(lambda: len(failed) >= 3)
        assert server.post(model="chinese", prompt="a", max_tokens=2).status_code == 200
        entry = server.app.state.routes._catalog._entries["japanese"]
        entry.version, entry.tried = None, ()
        answer = server.post(model="japanese", prompt="a", max_tokens=2)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_unreadable")
        short = False
        wait_for(lambda: server.post(model="japanese", prompt="a", max_tokens=2).status_code == 200)
