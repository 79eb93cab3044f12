"""For tests of a launched server: its processes, and streams that say how each of them ended."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc
from conftest import Running
from test_server import PROMPT, inputs, tensor
from tritonclient.utils import InferenceServerException

STREAMS = 50
MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def models(pid: int) -> dict[str, int]:
    """The models' processes of the server `pid`, those that load included."""
    found = {}
    for child in children(pid):
        command = Path(f"/proc/{child}/cmdline").read_bytes().decode()
        found |= {model: child for model in MODELS if f"/{model}/1/model.py\0" in command}
    return found


def processes(server: Running) -> dict[str, int]:
    """Of each model, of the server, of the supervisor and its deputies, when it serves."""
    wait_for("the service", lambda: server.launch("--status").returncode == 0)
    state = server.state()
    deputies = {f"deputy {i}": pid for i, pid in enumerate(state["deputies"], 1)}
    return {"server": state["server"], "supervisor": state["supervisor"]} | deputies | models(state["server"])


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_for(what: str, condition: object, seconds: float = 60) -> None:
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
    """Many streams at once, half of them through the ensemble; counts what each one heard.

    endless: one that has ended is sent again, until there is an error.
    """

    def __init__(self, server: Running, count: int, new: int, endless: bool) -> None:
        self.events: queue.Queue[tuple[int, str]] = queue.Queue()
        self._endless = endless
        self.heard = dict.fromkeys(range(count), "")
        self._stack = ExitStack()
        streaming = {"streaming": np.array([[True]])}
        for i in range(count):
            client = self._stack.enter_context(grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}"))
            request = text_inputs("Hello", new) if i % 2 else inputs(PROMPT, new, **streaming)
            model = "ensemble" if i % 2 else "tensorrt_llm"
            send = partial(client.async_stream_infer, model, request, enable_empty_final_response=True)
            client.start_stream(partial(self._hear, i, send))
            send()

    def _hear(
        self, i: int, send: Callable[[], None], result: grpc.InferResult | None, error: Exception | None
    ) -> None:
        kind = self._kind(result, error)
        if kind == "end" and self._endless:
            with suppress(InferenceServerException):  # it is told as an error of its own
                send()
        else:
            self.events.put((i, kind))

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
def streams(
    server: Running, count: int = STREAMS, new: int = 200, endless: bool = False
) -> Iterator[Streams]:
    made = Streams(server, count, new, endless)
    try:
        made.wait_for_data()
        yield made
    finally:
        made.close()
