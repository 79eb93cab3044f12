"""RootScanner: keeps the catalog's entries in step with files, which may change at any time."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora.lora.catalog.files import Fingerprint, Found, find_adapters, fingerprint
from manylora.openai.serving.adapter_entry import AdapterEntry, Terms

logger = logging.getLogger("manylora")


@dataclass(frozen=True)
class RootScanner:
    """Belongs to the event loop.

    entries:   by name; what the scan adds to and removes from.
    roots:     searched for adapters. allowed: where links below them may lead. bases: as of `find_adapters`.
    uploads:   folders of uploaded adapters, which are files; those of a name take precedence.
    told:      folders that are not looked at: their files change by requests, which tell the catalog.
    missing_s: for which an adapter's files must be gone, before it is no entry any more.
    on_thread: calls a function on a thread for files.
    may_have:  whether an adapter that is found may have a name.
    terms_of:  of an adapter that is found at a path.
    gone:      called with each name that is no entry any more.
    unloaded:  adapters that were unloaded, by name: they come back only when their files have changed.
    """

    entries: dict[str, AdapterEntry]
    roots: Sequence[Path]
    allowed: Sequence[Path]
    bases: Sequence[str]
    uploads: Sequence[Path]
    told: Sequence[Path]
    missing_s: float
    on_thread: Callable[..., Awaitable[Any]]
    may_have: Callable[[str], bool]
    terms_of: Callable[[Path], Terms]
    gone: Callable[[str], None]
    unloaded: dict[str, Fingerprint] = field(default_factory=dict)

    async def scan(self) -> None:
        """Look at all roots, and at the files of the entries that come from elsewhere."""
        found, complete = await self._find()
        for name, one in found.items():
            self._note_found(name, one)
        for entry in list(self.entries.values()):
            if any(entry.path.is_relative_to(one) for one in self.told):
                continue
            if not entry.scanned:
                with contextlib.suppress(OSError):
                    entry.note_files(await self.on_thread(fingerprint, entry.path) or entry.found)
            elif entry.name not in found and complete:
                self._note_missing(entry)

    async def _find(self) -> tuple[dict[str, Found], bool]:
        """What is below the roots, and whether all of them could be scanned. Of two adapters with one name
        the first one counts."""
        known = {entry.path: entry.found for entry in self.entries.values()}
        found: dict[str, Found] = {}
        complete = True
        for root, sent in [*((one, True) for one in self.uploads), *((one, False) for one in self.roots)]:
            try:
                below = await self.on_thread(find_adapters, root, known, self.allowed, self.bases, sent)
            except Exception as error:  # the other roots are scanned, and no adapter is withdrawn
                logger.warning("lora root: it cannot be scanned now: %s", error)
                complete = False
                continue
            for name, one in below.items():
                if self.may_have(name):
                    found.setdefault(name, one)
        return found, complete

    def _note_found(self, name: str, found: Found) -> None:
        if self.unloaded.get(name) == found.fingerprint:
            return
        self.unloaded.pop(name, None)
        entry = self.entries.get(name)
        if entry is None:
            terms = self.terms_of(found.path)
            self.entries[name] = AdapterEntry(name, found.path, True, found.fingerprint, terms=terms)
        elif entry.scanned:
            entry.missing_since = None
            entry.path = found.path
            entry.note_files(found.fingerprint)

    def _note_missing(self, entry: AdapterEntry) -> None:
        """Removed, or about to be replaced: a later scan decides."""
        now = time.monotonic()
        if entry.missing_since is None:
            entry.missing_since = now
        elif now - entry.missing_since >= self.missing_s:
            logger.info("adapter %s is withdrawn: its files are gone", entry.name)
            del self.entries[entry.name]
            self.gone(entry.name)
