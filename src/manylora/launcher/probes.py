"""Whether tritonserver and its HTTP proxy answer the launcher, on ways that no client can block; limits from
which a silence counts as a hang, and from which memory is too much.
"""

from __future__ import annotations

import http.client
import os
import select
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

from manylora.launcher.processes import stat_of

STOPPED_S = 5.0  # a process stopped by a signal for this long counts as hung
SILENCE_S = 30.0  # a process without an answer for this long counts as hung, unless it computes
BUSY = 1 / 30  # processor time per second from which a process computes; an idle tritonserver takes 1/500
PATIENCE = 10  # a process that computes may be silent for this many times as long
USER, SYSTEM = 11, 12  # indices of processor time in `stat_of`
QUIET_S = 2.0  # idle time before a server that has grown is restarted
TICK = os.sysconf("SC_CLK_TCK")


class Silence:
    """Decides when a process that does not answer hangs.

    One that uses the processor may be busy: all of its threads with large requests, say. Ending it would end
    the requests of others.
    """

    def __init__(self, now: float) -> None:
        self._answered = self._moved = now
        self._used = 0.0

    def of(self, answered: bool, used: float, now: float, limit: float) -> float | None:
        """For how many seconds it has not answered, if it hangs; otherwise None.

        answered: since the last call. used: seconds of processor time. limit: seconds. now: of any clock.
        """
        limit = min(limit, SILENCE_S)
        if answered:
            self._answered = now
        if answered or used - self._used >= BUSY * limit:
            self._moved, self._used = now, used
        silent = now - self._answered
        return silent if now - self._moved > limit or silent > PATIENCE * limit else None


class MemoryLimit:
    """Decides when tritonserver is restarted because of its memory. limit: bytes, 0 for none.

    The server never frees the memory of large tensors and refused gRPC requests.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._quiet_since: float | None = None

    def exceeded(self, resident: int, held: int, now: float) -> str | None:
        """The reason to restart now: over the limit and idle for a moment, or over twice the limit.

        resident: bytes of the server. held: open requests. now: seconds of a monotonic clock.
        """
        if held or not self._limit or resident <= self._limit:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        is_quiet = self._quiet_since is not None and now - self._quiet_since > QUIET_S
        if is_quiet or 0 < 2 * self._limit < resident:
            return f"tritonserver holds {resident >> 20} MiB, of at most {self._limit >> 20}"
        return None


class ProxyProbe:
    """A connected pair of sockets: the HTTP proxy sends back what the launcher sends.

    other: the proxy's; close it once the proxy has it.
    """

    def __init__(self) -> None:
        self._own, self.other = socket.socketpair()
        self._own.setblocking(False)

    def answered(self) -> bool:
        """Whether it has answered since the last call. Asks again."""
        answered = False
        with suppress(OSError):  # nothing is there
            answered = bool(self._own.recv(2**10))
        with suppress(OSError):  # it does not read
            self._own.send(b"?")
        return answered

    def close(self) -> None:
        self._own.close()


def http_answers(
    port: int, path: str, headers: Mapping[str, str], going: Callable[[], bool], body: str | None = None
) -> bool:
    """Whether a server on this machine answers with success while `going` returns True, which is called
    several times a second.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("POST" if body else "GET", path, body, dict(headers))
        while not select.select([connection.sock], [], [], 0.1)[0]:
            if not going():
                return False
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def processor_time(pid: int) -> float:
    """Seconds that a process has used. 0 if there is none."""
    fields = stat_of(pid)
    return (int(fields[USER]) + int(fields[SYSTEM])) / TICK if fields else 0.0
