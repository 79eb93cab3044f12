"""RemoteTarget: sends requests to a running server from a pool of threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from manylora.bench.datasets import BenchRequest
from manylora.bench.load import Answer

MAX_CONNECTIONS = 256
ANSWER_TIMEOUT_S = 600.0


class RemoteTarget:
    """Base class of server targets. Each thread has its own connection. connections: their number; 0: the
    maximum.
    """

    def __init__(self, connections: int) -> None:
        self._pool = ThreadPoolExecutor(min(connections or MAX_CONNECTIONS, MAX_CONNECTIONS))
        self._local = threading.local()
        self._opened: list[Any] = []
        self._lock = threading.Lock()

    async def send(self, request: BenchRequest) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, request)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for connection in self._opened:
            connection.close()

    def _ask(self, request: BenchRequest) -> Answer:
        raise NotImplementedError

    def _connect(self) -> Any:
        """A new connection, with a method `close`."""
        raise NotImplementedError

    def _connection(self) -> Any:
        """This thread's connection."""
        if getattr(self._local, "connection", None) is None:
            self._local.connection = connection = self._connect()
            with self._lock:
                self._opened.append(connection)
        return self._local.connection

    def _drop_connection(self) -> None:
        """Make this thread's next request open a new connection."""
        self._local.connection = None
