"""Processes that have imported torch already, which takes two seconds of a processor each time. They are
forked from one process of the session, which has no threads. What ranks run in them is what they run as
programs of their own, which test_group.py and the server's tests start.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora.ranks.channel import Channel
from manylora.ranks.rendezvous import COMMAND, Link

PRELOADED = COMMAND, "rank_worker"
MOST = 2**16  # bytes of a request
PAUSE_S = 0.005


class ForkServer:
    """Thread-safe."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock, self._started = threading.Lock(), list[Forked]()
        here = Path(__file__).parent
        paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        theirs.close()

    def start(self, module: str, arguments: Sequence[str], sockets: Sequence[socket.socket] = ()) -> Forked:
        """Calls `main` of a module with these arguments and then the numbers that the sockets have there."""
        numbers = [one.fileno() for one in sockets]
        forked = Forked(self, self.ask({"module": module, "arguments": list(arguments)}, numbers))
        self._started.append(forked)
        return forked

    def running(self) -> list[int]:
        """The processes that have not ended."""
        self._started = [one for one in self._started if one.poll() is None]
        return [one.pid for one in self._started]

    def spawn_ranks(self, size: int) -> list[Link]:
        """As `rendezvous.spawn_ranks`."""
        links: list[Link] = []
        for rank in range(1, size):
            ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
            process: Any = self.start(COMMAND, [str(self._process.pid)], theirs)
            for one in theirs:
                one.close()
            links.append(Link(rank, Channel(ours[0]), Channel(ours[1]), process))
        return links

    def ask(self, request: dict[str, Any], numbers: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._requests, [json.dumps(request).encode()], numbers)
            return json.loads(self._requests.recv(MOST))

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


class Forked:
    """Like a `Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._server = server

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"wait": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(PAUSE_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def serve(requests: socket.socket) -> None:
    while True:
        data, numbers, _, _ = socket.recv_fds(requests, MOST, 8)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            requests.close()
            os.setsid()
            run(request, numbers)
        for number in numbers:
            os.close(number)
        requests.send(json.dumps(answer).encode())


def run(request: dict[str, Any], numbers: Sequence[int]) -> None:
    """Ends this process."""
    try:
        importlib.import_module(request["module"]).main([*request["arguments"], *map(str, numbers)])
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
