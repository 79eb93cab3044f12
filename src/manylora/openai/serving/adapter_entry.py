"""AdapterEntry: a name in the catalog, and how its files become a version that is served."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora.errors import AdapterError
from manylora.lora.catalog.files import Fingerprint, age_s, fingerprint, is_passing
from manylora.lora.catalog.library import task_id_of
from manylora.lora.catalog.reader import AdapterFacts, AdapterReader, ReadAdapter
from manylora.lora.text.adapter_text import AdapterText, AdapterTexts
from manylora.openai.api.errors import ApiError, adapter_problem

logger = logging.getLogger("manylora")

RETRY_S = 0.05  # before changing files are read again


@dataclass(frozen=True)
class Version:
    """One content of an adapter. task_id: the engine's, from the digest. text: its own; None: the base
    model's. number: counts versions of the name; 0: not served yet.
    """

    name: str
    digest: str
    task_id: int
    facts: AdapterFacts
    created: int
    text: AdapterText | None = None
    number: int = 0


@dataclass
class Terms:
    """Terms under which an adapter is in the catalog.

    pinned: it stays in the engine's cache. idle_ttl_seconds: it is unloaded after this time without a
    request; None: never. owner: name of the API key that loaded it; "": none. public: other keys may use it.
    """

    pinned: bool = False
    idle_ttl_seconds: float | None = None
    owner: str = ""
    public: bool = False


@dataclass(eq=False)
class AdapterEntry:
    """A name. version: the version that is served, the last good one. problem: why there is no newer one."""

    name: str
    path: Path
    scanned: bool  # found in a root: removed when its files are removed
    found: Fingerprint = ()  # of its files at the last scan
    changed_at: float = field(default_factory=time.monotonic)  # when `found` changed
    tried: Fingerprint = ()  # at the start of the last read
    version: Version | None = None
    problem: ApiError | None = None
    missing_since: float | None = None
    terms: Terms = field(default_factory=Terms)
    used_at: float = field(default_factory=time.monotonic)  # when the last request started or ended
    num_open: int = 0  # running requests
    reading: asyncio.Task[ReadAdapter] | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # unloaded, and no requests are left

    @property
    def file_bytes(self) -> int:
        return sum(stamp[3] for stamp in self.found)

    @property
    def has_expired(self) -> bool:
        ttl = self.terms.idle_ttl_seconds
        return ttl is not None and not self.num_open and time.monotonic() - self.used_at >= ttl

    def note_files(self, now: Fingerprint) -> None:
        if now != self.found:
            self.found, self.changed_at = now, time.monotonic()


class EntryReader:
    """Reads entries, each at most once at a time. Event loop only.

    texts: reads the text settings of adapters. on_thread: runs a function on a thread for files. quiet_s: how
    long files must be unchanged before an error in them counts. keep: called with what was read. changed:
    called when an entry has a new version.
    """

    def __init__(
        self,
        reader: AdapterReader,
        texts: AdapterTexts,
        on_thread: Callable[..., Awaitable[Any]],
        quiet_s: float,
        keep: Callable[[ReadAdapter], Awaitable[None]],
        changed: Callable[[AdapterEntry, ReadAdapter], None],
    ) -> None:
        self._changed = changed
        self._reader, self._on_thread, self._quiet_s, self._keep = reader, on_thread, quiet_s, keep
        self._texts = texts
        self.num_failures: Counter[str] = Counter()  # by error code

    async def read(self, entry: AdapterEntry) -> ReadAdapter:
        """All concurrent callers wait for the same read. Raises ApiError."""
        if entry.reading is None:
            entry.reading = asyncio.create_task(self._read_once(entry))
            entry.reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Cancelling one caller must not cancel the read for the others.
        return await asyncio.shield(entry.reading)

    async def _read_once(self, entry: AdapterEntry) -> ReadAdapter:
        try:
            try:
                read, text = await self._read_quiet(entry)
            except ApiError:
                raise
            except Exception as error:
                raise self._report(entry, self._problem(entry, error)) from error
            self._set_version(entry, read, text)
            await self._keep(read)
            return read
        finally:
            entry.reading = None

    async def _read_quiet(self, entry: AdapterEntry) -> tuple[ReadAdapter, AdapterText | None]:
        """Files that are being written are read until they no longer change. Raises AdapterError,
        ApiError.
        """
        give_up = time.monotonic() + 2 * self._quiet_s + 1
        while True:
            entry.tried = before = await self._on_thread(fingerprint, entry.path)
            entry.note_files(before)
            failure: AdapterError | None = None
            try:
                read = await self._on_thread(self._read_files, entry.name, entry.path)
            except AdapterError as error:
                failure = error
            if await self._on_thread(fingerprint, entry.path) == before:
                if failure is None:
                    return read
                if age_s(before) >= self._quiet_s:
                    raise failure
            if time.monotonic() > give_up:
                entry.tried = ()
                reason = f"adapter {entry.name!r} is being changed, try again"
                raise ApiError(503, "adapter_changing", reason, "model", retry_after=1)
            await asyncio.sleep(RETRY_S)

    def _read_files(self, name: str, path: Path) -> tuple[ReadAdapter, AdapterText | None]:
        text = self._texts.read(name, path)  # first, because it is small
        return self._reader.read(path), text

    def _set_version(self, entry: AdapterEntry, read: ReadAdapter, text: AdapterText | None) -> None:
        digest, facts, old = read.adapter.digest, read.facts, entry.version
        if old is None or old.digest != digest or old.text != text:
            entry.version = Version(entry.name, digest, task_id_of(digest), facts, int(time.time()), text)
            logger.info("adapter %s: %s, rank %d, %s", entry.name, facts.kind, facts.rank, digest[:12])
            self._changed(entry, read)
        entry.problem = None

    def _problem(self, entry: AdapterEntry, error: Exception) -> ApiError:
        """The error for a failed read. If the failure is temporary, the next scan reads the files again."""
        of_files = isinstance(error, AdapterError | OSError)
        if of_files and (is_passing(error) or is_passing(error.__cause__)):
            entry.tried = ()
            reason = f"adapter {entry.name!r} cannot be read at the moment, try again"
            return ApiError(503, "adapter_unreadable", reason, "model", retry_after=1)
        reason = str(error) if isinstance(error, AdapterError) else "its files cannot be read"
        if not of_files:
            logger.exception("reading adapter %s failed", entry.name)
            reason += f": {type(error).__name__}"
        return adapter_problem(entry.name, reason)

    def _report(self, entry: AdapterEntry, problem: ApiError) -> ApiError:
        self.num_failures[problem.code] += 1
        if entry.problem is None or entry.problem.message != problem.message:
            goes_on = "; its last good version goes on serving" if entry.version else ""
            logger.warning("%s%s", problem.message, goes_on)
        entry.problem = problem
        return problem
