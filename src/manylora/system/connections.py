"""How many connections may be open, and which of them makes room for a new one; whether a server listens."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Generic, TypeVar

Connection = TypeVar("Connection", bound=Hashable)


class OpenConnections(Generic[Connection]):
    """At most `most` open connections. One is idle while the server waits for its client.

    When all are open, the address with most of them loses the connection that has been idle longest. An
    address may have `per_address`. None: any number, for a gateway has one address for all of its clients,
    but one that has half of all gets none of the last quarter.
    """

    def __init__(self, most: int, per_address: int | None = None) -> None:
        self.most = most
        self._per_address = per_address
        self._addresses: dict[Connection, str] = {}
        self._held: Counter[str] = Counter()
        self._idle: dict[str, dict[Connection, float]] = {}  # by address: since when, longest first

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: Connection, address: str, now: float) -> Connection | None:
        """Add one that is idle. Returns the one to close, possibly this one, which counts no more."""
        evicted, held = None, self._held[address]
        if self._per_address is not None:
            has_its_share = held >= self._per_address
        else:
            has_its_share = 4 * len(self) >= 3 * self.most and 2 * held >= self.most
        if has_its_share or len(self) >= self.most:
            idle = {one: next(iter(found.items())) for one, found in self._idle.items()}  # longest
            if has_its_share:
                idle = {address: idle[address]} if address in idle else {}
            if not idle:
                return connection
            fullest = max(idle, key=lambda one: (self._held[one], -idle[one][1]))
            evicted = idle[fullest][0]
            self.remove(evicted)
        self._addresses[connection] = address
        self._held[address] += 1
        self.mark_idle(connection, now)
        return evicted

    def remove(self, connection: Connection) -> None:
        self.mark_busy(connection)
        if (address := self._addresses.pop(connection, None)) is not None:
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]

    def mark_busy(self, connection: Connection) -> None:
        address = self._addresses.get(connection)
        if address is not None and (idle := self._idle.get(address)):
            idle.pop(connection, None)
            if not idle:
                del self._idle[address]

    def mark_idle(self, connection: Connection, now: float) -> None:
        if (address := self._addresses.get(connection)) is not None:
            self._idle.setdefault(address, {})[connection] = now


def answers_at(path: Path) -> bool:
    """Whether a server listens on the Unix socket at this path."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it has too many clients, or they may not be this user
            pass
    return True


def address_of(peer: object) -> str:
    """Of a socket's peer: the IPv4 address, or the IPv6 network /64, which one customer usually has alone."""
    try:
        found = ipaddress.ip_address(str(peer[0]).partition("%")[0])  # type: ignore[index]
    except (ValueError, IndexError, TypeError):
        return ""
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    mapped = found.ipv4_mapped
    return str(mapped) if mapped else str(ipaddress.ip_network((found, 64), strict=False))
