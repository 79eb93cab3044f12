"""Versions: which content each name means now, and how many it has meant."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

MAX_NAMES = 2**16


class Versions:
    """Any thread. Counted from 1 for each name; the same content again is the same version. Of more names
    than MAX_NAMES those that changed longest ago are forgotten, and counted from 1 again.

    superseded: digests that a name has meant and none means now; the engine drops what it has of them, and
    takes them out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: OrderedDict[str, tuple[int, str]] = OrderedDict()  # "": withdrawn
        self._named: Counter[str] = Counter()  # names of each digest
        self.superseded: set[str] = set()
        self.num_changes = 0  # names that came to mean another content

    def put(self, name: str, digest: str, number: int = 0) -> tuple[int, str]:
        """Let a name mean a content. number: that others have given this version; 0: the next one. Returns
        its number, and the digest whose place it took; "": of none."""
        with self._lock:
            last, old = self._current.get(name, (0, ""))
            number = number or (last if old == digest else last + 1)
            if old == digest and number == last:
                return number, ""
            self._set(name, number, digest, old)
            if old in ("", digest):
                return number, ""
            self.num_changes += 1
            return number, old

    def seed(self, name: str, number: int, digest: str = "") -> None:
        """Count on from a number that others have come to. digest: what it stands for; it comes later, if
        the name means nothing here yet."""
        with self._lock:
            last, old = self._current.get(name, (0, ""))
            if number > last and not old:
                self._set(name, number, digest, old)

    def withdraw(self, name: str) -> None:
        """Let a name mean nothing. Its next version still has the next number."""
        with self._lock:
            number, old = self._current.get(name, (0, ""))
            if old:
                self._set(name, number, "", old)

    def number(self, name: str, digest: str = "") -> int:
        """That `put` would give to a content; without one, that of the last version."""
        last, old = self._current.get(name, (0, ""))
        return last + (digest not in ("", old))

    def current(self, name: str) -> tuple[int, str] | None:
        """Number and digest."""
        found = self._current.get(name)
        return found if found and found[1] else None

    def _set(self, name: str, number: int, digest: str, old: str) -> None:
        self._current[name] = number, digest
        self._current.move_to_end(name)
        self._named[digest] += 1
        self.superseded.discard(digest)
        if len(self._current) > MAX_NAMES:
            self._leave(self._current.popitem(last=False)[1][1])
        if self._leave(old):
            self.superseded.add(old)

    def _leave(self, digest: str) -> bool:
        """One name less has this content. Whether none has it."""
        self._named[digest] -= 1
        if self._named[digest] > 0:
            return False
        del self._named[digest]
        return bool(digest)
