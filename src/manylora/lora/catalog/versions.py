"""Versions: the current content of each name, and how many contents it has had."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

MAX_NAMES = 2**16


class Versions:
    """Thread-safe. Versions count from 1 per name; repeating the same content does not make a new version.
    Beyond MAX_NAMES names, those that changed longest ago are forgotten and count from 1 again.

    superseded: digests that no name refers to any more. The engine drops what it has of them and removes them
    from here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: OrderedDict[str, tuple[int, str]] = OrderedDict()  # "": withdrawn
        self._named: Counter[str] = Counter()  # number of names per digest
        self.superseded: set[str] = set()
        self.num_changes = 0  # number of changes of a name's content

    def put(self, name: str, digest: str, number: int = 0) -> tuple[int, str]:
        """Set a name's content. number: a version number given by others; 0: the next one.

        Returns its number, and the digest it replaced; "" if none.
        """
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
        """Continue counting from a number that others have reached. digest: the content of that version,
        which is set later if the name has no content here yet.
        """
        with self._lock:
            last, old = self._current.get(name, (0, ""))
            if number > last and not old:
                self._set(name, number, digest, old)

    def withdraw(self, name: str) -> None:
        """Remove a name's content. Its next version gets the next number."""
        with self._lock:
            number, old = self._current.get(name, (0, ""))
            if old:
                self._set(name, number, "", old)

    def number(self, name: str, digest: str = "") -> int:
        """The number that `put` would give to a content. Without a digest, that of the last version."""
        last, old = self._current.get(name, (0, ""))
        return last + (digest not in ("", old))

    def current(self, name: str) -> tuple[int, str] | None:
        """Number and digest of the current version."""
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
        """Remove one name from this content. Returns whether it has no names left."""
        self._named[digest] -= 1
        if self._named[digest] > 0:
            return False
        del self._named[digest]
        return bool(digest)
