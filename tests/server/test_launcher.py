"""Protects the launcher's commands: what cannot start says why, what is in flight when the server is stopped
is finished, and a number in a file is never taken for a process."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from launched import active, children, is_back, is_gone, processes, streams
from selection import extended
from servers import ROOT, Running, World, fill_repo, new_server
from test_management import http
from test_server import ask, inputs
from waiting import wait_for_named as wait_for

from manylora.doors.triton.launcher.cli import main

WHEEL = Path(find_spec("pytriton").origin).parent / "tritonserver"  # type: ignore[union-attr, arg-type]


@pytest.mark.extended
def test_process_1_of_a_container_starts_again_after_a_kill_and_drains_at_a_signal(
    world: World, tmp_path: Path
) -> None:
    contained = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*contained, "true"], capture_output=True, check=False).returncode:
        pytest.skip("process numbers of its own are not permitted here")
    served = new_server(fill_repo(tmp_path / "repo", world.model))
    for name in (signal.SIGKILL, signal.SIGTERM):
        command = [*contained, *served.command("--foreground")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as outside:
            try:
                wait_for("the server is up", lambda: served.state().get("state") == "ready")
                [launcher] = children(outside.pid)
                with served.slow() as brake, streams(served, 4) as open_streams:
                    os.kill(launcher, name)
                    brake.unlink()
                    ended = {kind[:5] for kind in open_streams.wait_for_ends(60).values()}
                assert ended == ({"error"} if name == signal.SIGKILL else {"end"})
                outside.wait(60)
            finally:
                outside.kill()  # and with it what is in the container
    assert outside.returncode == 0
    assert not marked(served.http)


@pytest.mark.parametrize("how", ["--stop", "Ctrl-C", *extended("kill")])
def test_a_start_can_be_stopped(world: World, tmp_path: Path, how: str) -> None:
    slow = new_server(fill_repo(tmp_path / "repo", world.model))
    with (
        slow.held(),
        subprocess.Popen(
            slow.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as starter,
    ):
        wait_for("its processes", lambda: marked(slow.http) and catches(starter.pid, signal.SIGTERM))
        if how == "--stop":
            assert slow.launch("--stop").returncode == 0
        elif how == "Ctrl-C":
            starter.send_signal(signal.SIGINT)
        else:
            os.kill(slow.state()["supervisor"], signal.SIGKILL)
        _, errors = starter.communicate(timeout=60)  # it would go on loading for 300 s
    assert starter.returncode == 1
    assert ("stopped" if how != "kill" else "the supervisor was killed") + " while" in errors
    assert not marked(slow.http)
    assert slow.launch("--status").stdout.startswith("no server was launched")


def catches(pid: int, name: signal.Signals) -> bool:
    """Whether the process has a handler for the signal. Python itself has none for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (name - 1) & 1)


def marked(http_port: int) -> list[int]:
    """Processes of the server with this port, whoever their parents are."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if re.search(rf"MANYLORA_RUN_DIR=[^\0]*-{http_port}\0".encode(), path.read_bytes()):
                found.append(int(path.parent.name))
    return found


def test_a_number_in_a_file_that_was_left_is_not_taken_for_a_process(tmp_path: Path) -> None:
    after = new_server(tmp_path)
    run_dir = Path(tempfile.gettempdir()) / f"manylora-{os.getuid()}-{after.http}"
    run_dir.mkdir(mode=0o700)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        left = {"state": "ready", "supervisor": stranger.pid, "server": 1, "processes": [1]}
        (run_dir / "state.json").write_text(json.dumps(left))
        assert after.launch("--status").returncode == 1
        assert after.launch("--stop").stdout.startswith("no server was launched")
        assert "holds no <model>/config.pbtxt" in after.launch().stderr  # and not: a launcher runs already
        assert stranger.poll() is None
        stranger.kill()
    assert not run_dir.exists()


def test_a_start_that_hangs_ends_with_the_reason(world: World, tmp_path: Path) -> None:
    hanging = new_server(fill_repo(tmp_path / "repo", world.model))
    with hanging.held():
        failed = hanging.launch("--start-timeout=1")
    assert failed.returncode == 1
    assert "tritonserver was not ready after 1 s" in failed.stderr
    assert hanging.launch("--status").returncode == 1


def test_a_start_that_cannot_work_says_why(world: World, tmp_path: Path) -> None:
    repo = fill_repo(tmp_path / "repo", world.model, lora_cache_max_adapter_size="many")
    secret = tmp_path / "secret"
    secret.write_text("abc", encoding="utf-8")
    for flag, words in (
        ("--exit_timeout=60", "parameter lora_cache_max_adapter_size must be a whole number, got 'many'"),
        (f"--management-secret-file={secret}", "must hold 16 or more letters"),
    ):
        failed = new_server(repo).launch(flag)
        assert failed.returncode == 1 and words in failed.stderr


def refusal(server: Running, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What a start says that is refused; in this process."""
    mask = os.umask(0o077)  # the command changes it
    try:
        assert main(server.command(*flags)[2:]) == 1
    finally:
        os.umask(mask)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--world_size=0",), "--world_size must be at least 1"),
        (("--multi-model", "--disable-spawn-processes"), "--multi-model"),
        (("--disable-spawn-processes",), "--disable-spawn-processes belongs to --multi-model"),
        (("--trtllm_llmapi_launch",), "--trtllm_llmapi_launch starts a process for each GPU"),
        (("--metrics_port=8009", "--grpc_port=8009"), "--grpc_port and --metrics_port are both 8009"),
        (("--grpc_port=70000",), "--grpc_port must be in 1 to 65535, got 70000"),
        (("--model_repo=/nowhere",), "holds no"),
    ],
)
def test_flags_without_meaning_are_refused_by_name(
    tmp_path: Path, flags: tuple, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(new_server(tmp_path), capsys, *flags)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere/tritonserver", "does not exist"),
        (__file__, "is not executable"),
        (str(WHEEL), f"is a folder: name the executable, {WHEEL}/bin/tritonserver"),
    ],
)
def test_an_executable_that_cannot_be_started_is_named(
    server: Running, path: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(new_server(server.repo), capsys, f"--tritonserver={path}")
    assert said == f"--tritonserver {path} {words}\n"


@pytest.mark.parametrize("address", ["203.0.113.9", "[::1]"])
def test_an_address_of_another_machine_is_named(
    server: Running, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(new_server(server.repo), capsys, f"--address={address}")
    assert said.startswith(f"--address {address}: ")
    assert "it must be an address of this machine" in said and said.count("\n") == 1


def test_an_unfilled_repository_and_ports_in_use(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not filled" in refusal(new_server(ROOT / "model_repo"), capsys)
    again = server.launch()
    assert again.returncode == 1
    assert "a launcher runs already for this port" in again.stderr
    assert f"end it with --stop --http_port={server.http}" in again.stderr
    elsewhere = new_server(server.repo).launch("--status")
    assert "no server was launched on http port" in elsewhere.stdout and str(server.http) in elsewhere.stdout
    taken = Running(server.repo, new_server(server.repo).http, server.grpc, server.metrics)
    assert f"--grpc_port {server.grpc} is in use" in refusal(taken, capsys)


@pytest.fixture(scope="module")
def own(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The wheel's executable under another name; models come and go. The last of its tests stops it."""
    path = tmp_path_factory.mktemp("own")
    link = path / "tritonserver"
    link.symlink_to(WHEEL / "bin" / "tritonserver")
    served = new_server(fill_repo(path / "repo", world.model))
    loaded = [f"--triton-arg=--load-model={name}" for name in ("ensemble", "tensorrt_llm_bls")]
    explicit = "--triton-arg=--model-control-mode=explicit"
    served.start(f"--tritonserver={link}", "--exit_timeout=7", explicit, *loaded)
    yield served
    assert served.launch("--stop").returncode == 0


def test_the_executable_of_the_wheel_is_started_with_its_parts_by_any_name(own: Running) -> None:
    shown = own.launch("--status")
    assert shown.returncode == 0 and json.loads(shown.stdout) == own.state()
    command = Path(f"/proc/{own.state()['server']}/cmdline").read_bytes().split(b"\0")
    assert b"--exit-timeout-secs=7" in command
    assert len(ask(own, inputs())) == 1


def test_a_model_that_is_unloaded_is_no_loss_and_one_that_dies_is(own: Running) -> None:
    model = own.repo / "tensorrt_llm_bls" / "1" / "model.py"
    door = "/v2/repository/models/tensorrt_llm_bls"
    before = processes(own)
    assert http(own, "POST", f"{door}/unload", own.secret) == 200
    wait_for("its process has ended", lambda: is_gone(before["tensorrt_llm_bls"]))
    assert http(own, "POST", f"{door}/load", own.secret) == 200
    time.sleep(1)  # in which the launcher would end the service
    after = processes(own)
    assert http(own, "GET", "/v2/models/tensorrt_llm_bls/ready") == 200
    assert after["tensorrt_llm_bls"] != before["tensorrt_llm_bls"]
    assert after["server"] == before["server"] and after["tensorrt_llm"] == before["tensorrt_llm"]
    code = model.read_text(encoding="utf-8")
    model.write_text(f"{code}\nraise RuntimeError('broken')\n", encoding="utf-8")
    assert http(own, "POST", f"{door}/load", own.secret) == 400
    model.write_text(code, encoding="utf-8")
    time.sleep(1)
    assert processes(own)["server"] == before["server"]
    os.kill(after["tensorrt_llm_bls"], signal.SIGKILL)
    wait_for("the service is back", lambda: is_back(own, before["server"]))


def until_refused(server: Running, stopper: threading.Thread) -> str:
    """Send requests until one of them is refused, and wait for none. Returns what it was told."""
    errors: queue.SimpleQueue[str] = queue.SimpleQueue()
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: errors.put(str(error)) if error else None)
        while stopper.is_alive() and errors.empty():
            client.async_stream_infer("tensorrt_llm", inputs(new=1))
            time.sleep(0.05)
        told = errors.get(timeout=60)
        client.stop_stream(cancel_requests=True)  # what was taken before waits behind slow answers
    return told


def test_stopping_finishes_what_is_in_flight_refuses_what_is_new_and_leaves_nothing(own: Running) -> None:
    with pytest.raises(grpc.InferenceServerException, match="max_tokens"):
        ask(own, inputs(new=-3))  # the traceback of the error refers to the server's objects
    everyone = processes(own)
    with Path(own.state()["log"]).open(encoding="utf-8") as log:
        with own.slow() as brake, streams(own, 20) as open_streams:
            wait_for("all are taken", lambda: active(own) == 20)
            stopper = threading.Thread(target=own.launch, args=("--stop",))
            stopper.start()
            refused = until_refused(own, stopper)
            brake.unlink()
            ends = open_streams.wait_for_ends(120)
            stopper.join()
        assert "Fatal Python error" not in log.read()
    assert set(ends.values()) == {"end"}
    assert "Server is stopping" in refused
    wait_for("all processes are gone", lambda: all(map(is_gone, everyone.values())))
    assert not list(Path("/dev/shm").glob(f"manylora_*_{own.http}_*"))
    assert own.launch("--status").returncode == 1
