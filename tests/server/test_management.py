"""Protects the doors that manage the server: closed to whoever has not the secret, and nothing that lies in
files is for other users."""

from __future__ import annotations

import os
import stat
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from servers import Running, new_server
from tritonclient.utils import InferenceServerException

HTTP_DOORS = (
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/mine/register"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("POST", "/v2/cudasharedmemory/region/mine/register"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("POST", "/v2/models/ensemble/trace/setting"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/ensemble/load"),
    ("POST", "/v2/repository/models/ensemble/unload"),
)
Call = Callable[[grpc.InferenceServerClient, dict], object]
GRPC_DOORS: dict[str, Call] = {
    "register": lambda c, h: c.register_system_shared_memory("mine", "/mine", 4, headers=h),
    "unregister": lambda c, h: c.unregister_system_shared_memory(headers=h),
    "status": lambda c, h: c.get_system_shared_memory_status(headers=h),
    "cuda": lambda c, h: c.register_cuda_shared_memory("mine", b"", 0, 4, headers=h),
    "logging": lambda c, h: c.update_log_settings({"log_file": "/tmp/theirs"}, headers=h),
    "trace": lambda c, h: c.update_trace_settings("ensemble", {"trace_rate": "1"}, headers=h),
    "index": lambda c, h: c.get_model_repository_index(headers=h),
    "load": lambda c, h: c.load_model("ensemble", headers=h),
    "unload": lambda c, h: c.unload_model("ensemble", headers=h),
}


def http(server: Running, method: str, path: str, secret: str | None = None) -> int:
    headers = {} if secret is None else {"manylora-management": secret}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.http}{path}", b"{}" if method == "POST" else None, headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_management_is_closed_without_the_secret(server: Running) -> None:
    for method, path in HTTP_DOORS:
        assert http(server, method, path) == 403, path
        assert http(server, method, path, "0" * 64) == 403, path
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        for name, call in GRPC_DOORS.items():
            for headers in ({}, dict.fromkeys(server.management, "0" * 64)):
                with pytest.raises(InferenceServerException, match="This protocol is restricted"):
                    call(client, headers)
                assert not Path("/tmp/theirs").exists(), name


def test_the_secret_opens_it_and_what_everybody_may_do_stays_open(server: Running) -> None:
    assert http(server, "GET", "/v2/systemsharedmemory/status", server.secret) == 200
    assert http(server, "GET", "/v2/logging", server.secret) == 200
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        assert client.get_log_settings(headers=server.management)
        assert client.get_model_repository_index(headers=server.management)
        assert client.is_server_ready() and client.is_model_ready("ensemble")
        assert client.get_model_metadata("ensemble").name == "ensemble"
        assert client.get_model_config("ensemble").config.name == "ensemble"
        assert client.get_inference_statistics("ensemble")
    for path in ("/v2", "/v2/health/ready", "/v2/models/ensemble", "/v2/models/ensemble/stats"):
        assert http(server, "GET", path) == 200


def test_what_lies_in_files_is_for_this_user_only(server: Running) -> None:
    regions = list(Path("/dev/shm").glob(f"manylora_{os.getuid()}_{server.http}_*"))
    assert regions
    for path in (
        *regions,
        server.run_dir,
        server.run_dir / "management.secret",
        server.run_dir / "server.log",
    ):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_nothing_is_started_where_somebody_else_may_have_laid_something(tmp_path: Path) -> None:
    trap = new_server(tmp_path)
    trap.run_dir.symlink_to(tmp_path)
    try:
        for flag in ("--stop", "--status", "--foreground"):
            refused = trap.launch(flag)
            assert refused.returncode == 1
            assert "is not a directory that only this user can use" in refused.stderr
    finally:
        trap.run_dir.unlink()
