"""For tests of a launched server: its processes, and streams that say how each of them ended."""

from __future__ import annotations

import queue
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from servers import Running
from test_server import PROMPT, inputs, tensor
from tritonclient.utils import InferenceServerException
from waiting import answers
from waiting import wait_for_named as wait_for

STREAMS = 24
MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")


def children(pid: int) -> list[int]:
    found = list[int]()
    with suppress(OSError):  # a process that has just ended, or a thread
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def command_line(pid: int) -> str:
    """With a NUL after each word; empty for a process that has just ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    return ""


def models(pid: int) -> dict[str, int]:
    """The models' processes of the server `pid`, those that load included."""
    found = {}
    for child in children(pid):
        command = command_line(child)
        found |= {model: child for model in MODELS if f"/{model}/1/model.py\0" in command}
    return found


def processes(server: Running) -> dict[str, int]:
    """Of each model, of the server, its proxy and the supervisor, when it serves."""
    wait_for("the service", lambda: served(server))
    state = server.state()
    own = {"server": state["server"], "proxy": state["processes"][1], "supervisor": state["supervisor"]}
    return own | models(state["server"])


def served(server: Running) -> dict[str, Any]:
    """The state of a service that is ready; nothing of another."""
    state = server.state()
    return state if state.get("state") == "ready" else {}


def goes_on(server: Running, before: dict[str, int]) -> bool:
    """Whether all of these processes are there and serve; much quicker than to ask for them again."""
    return not any(map(is_gone, before.values())) and is_ready(server, 60)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def is_back(server: Running, old: int) -> bool:
    return is_gone(old) and is_ready(server) and served(server).get("server", old) != old


def is_ready(server: Running, seconds: float = 5) -> bool:
    return answers(f"http://127.0.0.1:{server.http}/v2/health/ready", seconds)


def scrape(server: Running) -> dict[str, float]:
    """The server's metrics. What counts requests and tokens is exact once an answer is whole; the engine's
    gauges and totals are those of its last stats period."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line[:1] != "#"]
    return {key: float(value) for key, value in pairs if value}


def scrape_until(what: str, server: Running, done: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The first of its metrics for which `done` is true."""
    found: list[dict[str, float]] = []

    def is_done() -> bool:
        found[:] = [scrape(server)]
        return done(found[0])

    wait_for(what, is_done)
    return found[0]


def total(server: Running, family: str, label: str = "") -> float:
    """Of all label sets of a family in which `label` stands."""
    found = scrape(server).items()
    return sum(value for key, value in found if key.startswith(f"{family}{{") and label in key)


def active(server: Running) -> float:
    """Sequences that the engine has, also those that wait."""
    return total(server, "nv_trt_llm_request_metrics", 'request_type="active"')


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
        while self.events.get(timeout=60)[1] != "data":
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
