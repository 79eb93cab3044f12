"""When tritonserver is restarted because of the memory it has taken."""

from __future__ import annotations

QUIET_S = 2.0  # without a request


class MemoryLimit:
    """limit: bytes, 0 for none. The server never frees what large tensors and refused gRPC requests took."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._quiet_since: float | None = None

    def exceeded(self, resident: int, held: int, now: float) -> str | None:
        """The reason to restart now: no request for a moment, or twice the limit.

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
