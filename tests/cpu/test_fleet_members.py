"""Protects that servers with one catalog agree: what one was asked to change the others have too, also one
that starts later, that was away, or that is asked at the same time. Without Ray."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save
from starlette.requests import Request
from starlette.responses import Response
from tiny_models import make_adapter, make_model, reference_generate

from manylora.adapters.catalog import uploads as adapter_record
from manylora.adapters.catalog.entry import AdapterEntry
from manylora.adapters.catalog.shared import USED, State
from manylora.adapters.catalog.uploads import AdapterRecord, Uploads
from manylora.doors.fleet.member import Changed, Member, RemoteRequest, change_response
from manylora.doors.fleet.options import FleetOptions
from manylora.doors.http.adapter_routes import RECEIVED
from manylora.doors.http.server import open_app

PROMPT = [5, 17, 42, 99, 7]
BINARY = [(b"content-type", b"application/octet-stream")]
JSON = [(b"content-type", b"application/json")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder / "model", "llama", seed=11)
    for number in range(3):
        make_adapter(folder / "adapters" / f"a{number}", model, seed=number)
    return model


@pytest.fixture
def root(model: Path) -> Path:
    return model.parent / "adapters"


class Fleet:
    """Servers in this process, which know of each other by their folder only."""

    def __init__(self, model: Path, folder: Path, **options: Any) -> None:
        given: dict[str, Any] = {
            "served_model_name": ("base",),
            "sections": {"device": "cpu"},
            "lora_root": (model.parent / "adapters",),
            "lora_upload_dir": folder,
            "lora_refresh_seconds": 60.0,
            "drain_seconds": 5.0,
            "allow_runtime_lora_updating": True,
        }
        self.options = FleetOptions(model, **(given | options))
        self.folder = folder
        self.members: list[Member] = []
        self._stack = AsyncExitStack()

    async def start(self, count: int = 1) -> Member:
        for _ in range(count):
            app = open_app(self.options)
            await self._stack.enter_async_context(app.router.lifespan_context(app))
            self.members.append(Member(app, f"r{len(self.members)}"))
        return self.members[-1]

    async def close(self) -> None:
        await self._stack.aclose()

    async def send(self, member: Member, name: str, adapter: Path, **query: str) -> Changed:
        """PUT an adapter's tensors, whose file the front has received."""
        uploads = Uploads(2**30, self.folder, AdapterRecord(self.folder))

        async def pieces() -> Any:
            yield body_of(adapter)

        path = await uploads.receive(pieces())
        call = request("PUT", f"/v1/lora_adapters/{name}", BINARY, received=str(path), **query)
        return await member.change(call)

    async def look(self, changed: Changed) -> dict[str, State]:
        return dict([await one.look(changed.name, changed.revision, 60.0) for one in self.members])


def body_of(adapter: Path) -> bytes:
    config = (adapter / "adapter_config.json").read_text()
    return save(load_file(adapter / "adapter_model.safetensors"), {"adapter_config": config})


def request(
    method: str, path: str, headers: Any = (), body: bytes = b"", received: str = "", **query: str
) -> RemoteRequest:
    text = "&".join(f"{name}={value}" for name, value in query.items()).encode()
    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "query_string": text}
    headers = [(b"host", b"localhost"), *headers]
    return RemoteRequest.of(Request({**scope, "headers": headers}), body, received=received)


def post(path: str, **fields: Any) -> RemoteRequest:
    return request("POST", f"/v1/{path}", JSON, json.dumps(fields).encode())


async def complete(member: Member, name: str, revision: int = 0, **more: Any) -> dict[str, Any]:
    fields = {"model": name, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    call = post("completions", **fields, return_token_ids=True, **more)
    found = await member.whole_answer(RemoteRequest(call.scope, call.headers, call.body, revision))
    return {"status": found.status_code, **json.loads(found.body)}


def run(
    model: Path, folder: Path, play: Callable[[Fleet], Awaitable[None]], count: int = 2, **options: Any
) -> None:
    async def whole() -> None:
        fleet = Fleet(model, folder, **options)
        try:
            await fleet.start(count)
            await play(fleet)
        finally:
            await fleet.close()

    asyncio.run(whole())


def test_a_server_that_was_not_told_looks_before_it_answers(model: Path, root: Path, tmp_path: Path) -> None:
    async def play(fleet: Fleet) -> None:
        first, second = fleet.members
        changed = await fleet.send(first, "new", root / "a0")
        assert (await complete(second, "new"))["status"] == 404, "nobody has told it"
        assert (await complete(second, "new", changed.revision))["status"] == 200

    run(model, tmp_path / "shared", play)


def test_two_writers_at_once_end_in_one_state(model: Path, root: Path, tmp_path: Path) -> None:
    async def play(fleet: Fleet) -> None:
        pairs = [(fleet.members[n % 2], root / f"a{n % 3}") for n in range(6)]
        found = await asyncio.gather(*(fleet.send(one, "policy", adapter) for one, adapter in pairs))
        in_order = sorted(found, key=lambda one: one.revision)
        told = [json.loads(one.answer.body) for one in in_order]
        contents = [key for key, _ in itertools.groupby((one["version"], one["digest"]) for one in told)]
        assert [number for number, _ in contents] == list(range(1, len(contents) + 1))
        last = in_order[-1]
        states = await fleet.look(last)
        assert len({(one.version, one.digest) for one in states.values()}) == 1
        assert states["r0"].digest == json.loads(last.answer.body)["digest"]

    run(model, tmp_path / "shared", play)


def test_unloaded_is_unloaded_everywhere_and_later(model: Path, root: Path, tmp_path: Path) -> None:
    async def play(fleet: Fleet) -> None:
        first, second = fleet.members
        await fleet.look(await fleet.send(first, "sent", root / "a1"))
        for name in ("sent", "a0"):  # one that was sent, and one below a root
            changed = await second.change(request("DELETE", f"/v1/lora_adapters/{name}"))
            assert json.loads(changed.answer.body)["deleted"]
            states = await fleet.look(changed)
            assert {(one.version, one.problem) for one in states.values()} == {(0, "")}
            for one in (*fleet.members, await fleet.start()):
                assert (await complete(one, name))["status"] == 404
        assert not list(fleet.folder.rglob("*.safetensors"))
        again = await second.change(post("unload_lora_adapter", lora_name="a0"))
        assert (again.answer.status_code, again.name) == (404, "")
        changed = await fleet.send(first, "sent", root / "a1")
        assert json.loads(changed.answer.body)["version"] == 2, "its numbers go on"

    run(model, tmp_path / "shared", play)


@pytest.mark.usefixtures("slow_steps")
def test_requests_under_way_are_waited_for_by_each(model: Path, root: Path, tmp_path: Path) -> None:
    async def play(fleet: Fleet) -> None:
        first, second = fleet.members
        more = {"max_tokens": 200, "return_token_ids": True}
        running = asyncio.create_task(complete_long(second, **more))
        while not second._app.state.routes.context.backend.stats().running:
            assert not running.done(), "it has ended before"
            await asyncio.sleep(0.005)
        changed = await first.change(post("unload_lora_adapter", lora_name="a0"))
        _, state = await second.look(changed.name, changed.revision, 120.0)
        assert state.running == 0 and (await running)["status"] == 200

    async def complete_long(member: Member, **more: Any) -> dict[str, Any]:
        fields = {"model": "a0", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, **more}
        found = await member.whole_answer(post("completions", **fields))
        return {"status": found.status_code}

    run(model, tmp_path / "shared", play)


def test_pins_aliases_and_paths_hold_for_all(model: Path, root: Path, tmp_path: Path) -> None:
    async def play(fleet: Fleet) -> None:
        first, second = fleet.members
        steps = [
            post("pin_lora_adapter", lora_name="a0"),
            post("load_lora_adapter", lora_name="stable", alias_of="a1"),
            post("load_lora_adapter", lora_name="copy", lora_path=str(root / "a2")),
        ]
        for step in steps:
            changed = await first.change(step)
            assert changed.answer.status_code == 200, changed.answer.body
            assert not any(one.problem for one in (await fleet.look(changed)).values())
        await fleet.start()
        for one in fleet.members:
            context = one._app.state.routes.context
            assert context.pinning.is_pinned("a0")
            assert (await complete(one, "stable"))["choices"] == (await complete(one, "a1"))["choices"]
            tokens = (await complete(one, "copy"))["choices"][0]["token_ids"]
            assert tokens == reference_generate(model, root / "a2", PROMPT, 6)
        changed = await second.change(post("pin_lora_adapter", lora_name="a0", pinned=False))
        await fleet.look(changed)
        changed = await second.change(post("unload_lora_adapter", lora_name="stable"))
        await fleet.look(changed)
        for one in fleet.members:
            assert not one._app.state.routes.context.pinning.is_pinned("a0")
            assert (await complete(one, "stable"))["status"] == 404

    run(model, tmp_path / "shared", play)


def test_owners_and_quotas_count_all_servers(model: Path, root: Path, tmp_path: Path) -> None:
    import hashlib

    keys = [
        {"name": "team", "load": True, "max_adapters": 2},
        {"name": "other"},
        {"name": "boss", "admin": True},
    ]
    file = tmp_path / "keys.json"
    shown = [{**one, "sha256": hashlib.sha256(one["name"].encode()).hexdigest()} for one in keys]
    file.write_text(json.dumps({"keys": shown}))

    async def play(fleet: Fleet) -> None:
        first, second = fleet.members
        for number, (member, status) in enumerate([(first, 200), (second, 200), (first, 403), (second, 403)]):
            changed = await as_key("team", fleet, member, f"t{number}", root / "a0")
            assert changed.answer.status_code == status, changed.answer.body
        for member in fleet.members:
            seen = [await status_of(member, key, "t0") for key in ("team", "other", "boss")]
            assert seen == [200, 404, 200]

    async def as_key(key: str, fleet: Fleet, member: Member, name: str, adapter: Path) -> Changed:
        BINARY.append((b"authorization", f"Bearer {key}".encode()))
        try:
            return await fleet.send(member, name, adapter)
        finally:
            BINARY.pop()

    async def status_of(member: Member, key: str, name: str) -> int:
        await member.look("", 2, 0)
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return (await member.whole_answer(request("GET", f"/v1/models/{name}", headers))).status_code

    run(model, tmp_path / "shared", play, api_keys=file, allow_runtime_lora_updating=False)


def test_an_idle_adapter_goes_when_nobody_uses_it(
    model: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time passes by hand; each server looks at its own clock and at the time of a file."""
    looks: Counter[int] = Counter()
    expired = AdapterEntry.has_expired.fget  # type: ignore[attr-defined]
    noted = property(lambda entry: looks.update([id(entry)]) or expired(entry))
    monkeypatch.setattr(AdapterEntry, "has_expired", noted)

    async def play(fleet: Fleet) -> None:
        first, second = fleet.members
        await fleet.look(await fleet.send(first, "brief", root / "a0", idle_ttl_seconds="1000"))
        entries = [one._app.state.routes.context.backend.catalog.entry("brief") for one in fleet.members]
        await looked(*entries)
        [marker] = (fleet.folder / USED).iterdir()
        os.utime(marker, (0, 0))
        assert (await complete(second, "brief"))["status"] == 200
        while marker.stat().st_mtime == 0:
            await asyncio.sleep(0.02)
        entries[0].used_at -= 1001
        await looked(*entries)
        assert await status(first) == 200, "the second has used it"
        entries[1].used_at -= 1001
        while (await status(first)) != 404 or (await status(second)) != 404:
            with suppress(FileNotFoundError):
                os.utime(marker, (0, 0))
            await asyncio.sleep(0.02)
        assert not list(fleet.folder.rglob("*.safetensors"))

    async def looked(*entries: AdapterEntry) -> None:
        before = looks.copy()
        while any(looks[id(one)] < before[id(one)] + 2 for one in entries):
            await asyncio.sleep(0.02)

    async def status(member: Member) -> int:
        return (await member.whole_answer(request("GET", "/v1/models/brief"))).status_code

    run(model, tmp_path / "shared", play, lora_refresh_seconds=0.2)


def test_bodies_are_bounded_by_what_all_have_placed(model: Path, root: Path, tmp_path: Path) -> None:
    size = len(body_of(root / "a0"))

    async def play(fleet: Fleet) -> None:
        first, second = fleet.members
        assert (await fleet.send(first, "x", root / "a0")).answer.status_code == 200
        full = await fleet.send(second, "y", root / "a1")
        assert full.answer.status_code == 413, full.answer.body
        assert (await fleet.send(second, "x", root / "a1")).answer.status_code == 200, (
            "in the place of the other"
        )

    run(model, tmp_path / "shared", play, lora_upload_bytes=size + 1000)


def test_a_folder_that_is_read_only_is_named(
    model: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(fleet: Fleet) -> None:
        def refuse(*given: Any, **more: Any) -> int:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(adapter_record.os, "open", refuse)
        changed = await fleet.members[0].change(post("pin_lora_adapter", lora_name="a0"))
        monkeypatch.undo()
        error = json.loads(changed.answer.body)["error"]
        assert (changed.answer.status_code, error["code"]) == (403, "not_allowed")
        assert "--lora-upload-dir is read-only" in error["message"]
        assert (await complete(fleet.members[0], "a0"))["status"] == 200

    run(model, tmp_path / "shared", play, count=1)


def test_the_answer_names_who_has_not_followed() -> None:
    def first(body: bytes, status: int = 200) -> Changed:
        return Changed(Response(body, status), "n", 7)

    states = {"r0": State(7, 2, "d"), "r1": State(7, 0, "", problem="no room"), "r2": State(6)}
    put = change_response(first(b'{"id": "n"}'), "PUT", "/v1/lora_adapters/n", states, ["r3"])
    told = json.loads(bytes(put.body))
    assert (put.status_code, told["id"], told["replicas"]) == (202, "n", ["r0"])
    assert told["late"]["r1"] == "no room" and set(told["late"]) == {"r1", "r2", "r3"}
    load = change_response(first(b"Success"), "POST", "/v1/load_lora_adapter", {"r0": State(7, 2, "d")}, [])
    assert (load.status_code, load.body) == (200, b"Success\nOn 1 replica, version 2, digest d.")
    assert dict(load.raw_headers)[b"content-length"] == str(len(load.body)).encode()
    left = change_response(
        first(b"", 202), "POST", "/v1/unload_lora_adapter", {"r0": State(7, running=3)}, []
    )
    assert left.status_code == 202 and b"3 are still under way" in left.body
    refused = change_response(first(b"{}", 409), "PUT", "/v1/lora_adapters/n", states, ["r3"])
    assert (refused.status_code, refused.body) == (409, b"{}")


def test_a_client_cannot_name_a_file_as_its_body() -> None:
    scope = {"method": "PUT", "path": "/", "headers": [], "query_string": b"", RECEIVED: "/etc/passwd"}
    assert RECEIVED not in RemoteRequest.of(Request({"type": "http", **scope})).scope
