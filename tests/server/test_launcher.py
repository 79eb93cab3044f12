"""Protects the supervision: what dies or hangs comes back without a person, every client hears of it, what
cannot start says why, and what is in flight when the server is stopped is finished."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
from conftest import ROOT, Running, World, fill_repo, new_server
from test_server import NEW, PROMPT, ask, inputs, new_ids, tensor

STREAMS = 50
MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def processes(server: Running) -> dict[str, int]:
    """Of each model, of the server, of the supervisor and its deputy."""
    state = server.state()
    found = {"server": state["server"], "supervisor": state["supervisor"]}
    for pid in children(state["server"]):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        found[next(model for model in MODELS if f"/{model}/" in command)] = pid
    [found["deputy"]] = [pid for pid in children(state["supervisor"]) if pid != state["server"]]
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_for(what: str, condition: object, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.1)
    raise AssertionError(f"{what} not within {seconds} s")


def is_back(server: Running, old: int) -> bool:
    shown = server.launch("--status")
    return shown.returncode == 0 and f'"server": {old},' not in shown.stdout


def text_inputs(text: str, new: int) -> list[grpc.InferInput]:
    return [
        tensor("text_input", np.array([[text.encode()]], np.object_)),
        tensor("max_tokens", np.array([[new]], np.int32)),
        tensor("stream", np.array([[True]])),
    ]


class Streams:
    """Many streams at once, half of them through the ensemble; counts what each one heard."""

    def __init__(self, server: Running, count: int, new: int) -> None:
        self.events: queue.Queue[tuple[int, str]] = queue.Queue()
        self.heard = dict.fromkeys(range(count), "")
        self._stack = ExitStack()
        streaming = {"streaming": np.array([[True]])}
        for i in range(count):
            client = self._stack.enter_context(grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}"))
            client.start_stream(lambda result, error, i=i: self.events.put((i, self._kind(result, error))))
            request = text_inputs("Hello", new) if i % 2 else inputs(PROMPT, new, **streaming)
            model = "ensemble" if i % 2 else "tensorrt_llm"
            client.async_stream_infer(model, request, enable_empty_final_response=True)

    @staticmethod
    def _kind(result: grpc.InferResult | None, error: Exception | None) -> str:
        if error is not None:
            return f"error: {error}"
        final = result.get_response().parameters["triton_final_response"].bool_param  # type: ignore[union-attr]
        return "end" if final else "data"

    def wait_for_data(self) -> None:
        while self.events.get(timeout=30)[1] != "data":
            pass

    def wait_for_ends(self, seconds: float) -> dict[int, str]:
        """How each stream ended; all within `seconds`."""
        deadline = time.monotonic() + seconds
        while not all(self.heard.values()):
            i, kind = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            if kind != "data":
                self.heard[i] = self.heard[i] or kind
        return self.heard

    def close(self) -> None:
        self._stack.close()


@contextmanager
def streams(server: Running, count: int = STREAMS, new: int = 200) -> Iterator[Streams]:
    made = Streams(server, count, new)
    try:
        made.wait_for_data()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("which", [*MODELS, "server", "supervisor", "deputy"])
def test_a_killed_process_is_replaced_every_client_hears_and_no_orphan_stays(
    server: Running, which: str
) -> None:
    before = processes(server)
    assert b"GOMP_SPINCOUNT=1000" in Path(f"/proc/{before['tensorrt_llm']}/environ").read_bytes()
    with streams(server) as open_streams:
        os.kill(before[which], signal.SIGKILL)
        ends = open_streams.wait_for_ends(15 if which != "deputy" else 60)
    if which == "deputy":
        assert set(ends.values()) == {"end"}
        wait_for("a new deputy", lambda: len(children(before["supervisor"])) == 2)
        assert processes(server)["server"] == before["server"]
        return
    assert any(kind.startswith("error") for kind in ends.values()), "nothing was in flight"
    wait_for("the service is back", lambda: is_back(server, before["server"]))
    assert len(new_ids(ask(server, inputs()))) == len(PROMPT) + NEW
    old = [pid for name, pid in before.items() if name not in ("supervisor", "deputy")]
    wait_for("no orphan", lambda: all(map(is_gone, old)), 5)
    wait_for("a deputy", lambda: len(children(processes(server)["supervisor"])) == 2)


def test_a_hung_server_is_replaced(world: World, tmp_path: Path) -> None:
    hung = new_server(fill_repo(tmp_path / "repo", world.model))
    assert hung.launch("--hang-timeout=2").returncode == 0
    try:
        for which in ("server", "tensorrt_llm"):
            before = processes(hung)
            # A stopped engine is seen as soon as a request waits for it.
            os.kill(before[which], signal.SIGSTOP)
            if which == "tensorrt_llm":
                os.kill(before[which], signal.SIGCONT)
                with streams(hung, 4):
                    os.kill(before[which], signal.SIGSTOP)
                    wait_for("the service is back", lambda old=before: is_back(hung, old["server"]))
            wait_for("the service is back", lambda old=before: is_back(hung, old["server"]))
            assert len(new_ids(ask(hung, inputs()))) == len(PROMPT) + NEW
    finally:
        hung.launch("--stop")


def test_stopping_finishes_what_is_in_flight_refuses_what_is_new_and_leaves_nothing(
    world: World, tmp_path: Path
) -> None:
    served = new_server(fill_repo(tmp_path / "repo", world.model))
    assert served.launch().returncode == 0
    everyone = processes(served)
    with streams(served, 20) as open_streams:
        stopper = threading.Thread(target=served.launch, args=("--stop",))
        stopper.start()
        refused = []
        while stopper.is_alive() and not refused:
            try:
                ask(served, inputs())
            except Exception as error:
                refused.append(str(error))
        ends = open_streams.wait_for_ends(30)
        stopper.join()
    assert set(ends.values()) == {"end"}
    assert "Server is stopping" in refused[0]
    wait_for("all processes are gone", lambda: all(map(is_gone, everyone.values())), 5)
    assert not list(Path("/dev/shm").glob(f"manylora_*_{served.http}_*"))
    assert served.launch("--status").returncode == 1


def test_in_the_foreground_a_signal_drains_too(world: World, tmp_path: Path) -> None:
    served = new_server(fill_repo(tmp_path / "repo", world.model))
    command = [*served.command("--foreground")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_for("the server is up", lambda: served.launch("--status").returncode == 0)
        with streams(served, 4) as open_streams:
            process.send_signal(signal.SIGTERM)
            assert set(open_streams.wait_for_ends(30).values()) == {"end"}
        assert process.wait(30) == 0
    assert served.launch("--status").returncode == 1


def test_a_start_that_hangs_ends_with_the_reason(world: World, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for path in world.model.iterdir():
        if path.name != "tokenizer.json":
            (tokenizer / path.name).symlink_to(path)
    os.mkfifo(tokenizer / "tokenizer.json")
    hanging = new_server(fill_repo(tmp_path / "repo", world.model, tokenizer_dir=str(tokenizer)))
    started = time.monotonic()
    failed = hanging.launch("--start-timeout=4")
    assert failed.returncode == 1
    assert "tritonserver was not ready after 4 s" in failed.stderr
    assert time.monotonic() - started < 20
    assert hanging.launch("--status").returncode == 1


def test_a_start_that_cannot_work_says_why(world: World, tmp_path: Path) -> None:
    repo = fill_repo(tmp_path / "repo", world.model, lora_cache_max_adapter_size="many")
    failed = new_server(repo).launch()
    assert failed.returncode == 1
    assert "parameter lora_cache_max_adapter_size must be a whole number, got 'many'" in failed.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--world_size=2",), "--world_size must be 1"),
        (("--multi-model",), "--multi-model"),
        (("--model_repo=/nowhere",), "holds no"),
    ],
)
def test_flags_without_meaning_are_refused_by_name(tmp_path: Path, flags: tuple, words: str) -> None:
    refused = new_server(tmp_path).launch(*flags)
    assert refused.returncode == 1
    assert words in refused.stderr


def test_an_unfilled_repository_and_ports_in_use(server: Running) -> None:
    unfilled = new_server(ROOT / "model_repo").launch()
    assert "is not filled" in unfilled.stderr
    again = server.launch()
    assert again.returncode == 1
    assert "a launcher runs already for this port" in again.stderr
    taken = Running(server.repo, new_server(server.repo).http, server.grpc, server.metrics).launch()
    assert f"--grpc_port {server.grpc} is in use" in taken.stderr


FAULTS = """

import time
from manylora.engine.engine import Engine

_step = Engine.step


def _faulty(engine):
    prompts = [sequence.request.prompt[0] for sequence in engine._everyone()]
    if 13 in prompts:
        raise MemoryError
    if 14 in prompts:
        time.sleep(10**6)
    return _step(engine)


Engine.step = _faulty
"""


def test_an_engine_thread_that_dies_or_is_stuck_is_replaced(world: World, tmp_path: Path) -> None:
    repo = fill_repo(tmp_path / "repo", world.model)
    with (repo / "tensorrt_llm" / "1" / "model.py").open("a") as file:
        file.write(FAULTS)
    server = new_server(repo)
    assert server.launch("--hang-timeout=3").returncode == 0
    try:
        log = Path(server.state()["log"]).with_name("supervisor.log")
        for token, reason in ((13, "is gone"), (14, "has not moved")):
            old = server.state()["server"]
            heard: queue.SimpleQueue = queue.SimpleQueue()
            with ExitStack() as stack:
                for _ in range(3):
                    client = stack.enter_context(grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}"))
                    client.start_stream(lambda result, error, heard=heard: heard.put(error))
                    client.async_stream_infer("tensorrt_llm", inputs([token, 5, 6], 50))
                errors = [str(heard.get(timeout=30)) for _ in range(3)]
            assert "None" not in errors
            assert token == 14 or any("The engine stopped: MemoryError" in error for error in errors)
            wait_for("the service is back", lambda old=old: is_back(server, old))
            assert len(new_ids(ask(server, inputs()))) == len(PROMPT) + NEW
            assert reason in log.read_text()
    finally:
        server.launch("--stop")
