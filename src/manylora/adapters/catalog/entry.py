"""AdapterEntry: a name in the catalog, and how its files become a version that is served. CatalogError: why
an adapter cannot be served, loaded or changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from manylora.adapters.catalog.files import Fingerprint, age_s, fingerprint, is_passing
from manylora.adapters.catalog.levels import DiskLevel, MemoryLevel
from manylora.adapters.catalog.library import task_id_of
from manylora.adapters.catalog.names import Versions
from manylora.adapters.catalog.reader import AdapterFacts, AdapterReader, ReadAdapter
from manylora.adapters.catalog.texts import AdapterText, AdapterTexts
from manylora.adapters.remote.resolver import Located
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.errors import AdapterError, RequestError
from manylora.system.threads import lower_priority

logger = logging.getLogger("manylora")

# Adapter readers raise a single exception type. The first pattern that matches its message gives the error
# code.
ADAPTER_CODES = (
    ("adapter_too_large", r"too large for the LoRA cache"),
    ("adapter_rank_too_large", r"low_rank|rank .*(limit|larger)"),
    (
        "adapter_wrong_base",
        r"another model|of this model|enabled for this model|numModelLayers|in the base model",
    ),
    ("adapter_unsupported", r"support|would be|pickle|not served|cannot be served"),
)
RETRY_S = 0.05  # before changing files are read again
Result = TypeVar("Result")


class CatalogError(RequestError):
    """code: stable, for programs. message: for people, without paths of this server. param: the field of a
    request that is wrong. retry_after: seconds after which it may work; None: it will not.
    """

    def __init__(
        self, code: str, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.param, self.retry_after = code, message, param, retry_after


def unusable(name: str, reason: str) -> CatalogError:
    """An adapter that exists but cannot be used."""
    code = next((code for code, pattern in ADAPTER_CODES if re.search(pattern, reason)), "adapter_broken")
    return CatalogError(code, f"adapter {name!r} cannot be served: {reason}", "model")


def not_found(name: str, field: str) -> CatalogError:
    """field: of the request, that names it."""
    return CatalogError("adapter_not_found", f"adapter {name!r} does not exist", field)


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
    """A name. version: the version that is served, the last good one. problem: why there is no newer one.
    located: where it was downloaded from; None: its files were here.
    """

    name: str
    path: Path
    scanned: bool  # found in a root: removed when its files are removed
    found: Fingerprint = ()  # of its files at the last scan
    changed_at: float = field(default_factory=time.monotonic)  # when `found` changed
    tried: Fingerprint = ()  # at the start of the last read
    version: Version | None = None
    problem: CatalogError | None = None
    missing_since: float | None = None
    terms: Terms = field(default_factory=Terms)
    located: Located | None = None
    used_at: float = field(default_factory=time.monotonic)  # when the last request started or ended
    num_open: int = 0  # running requests
    reading: asyncio.Task[ReadAdapter] | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # unloaded, and no requests are left

    @property
    def source(self) -> str:
        """Its URL without credentials; "": its files were here."""
        return self.located.source if self.located is not None else ""

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
    """Reads the catalog's entries, each at most once at a time, on threads of its own, and keeps copies.
    quiet_s: how long files must be unchanged before an error in them counts. The rest as in `AdapterCatalog`.
    """

    def __init__(
        self,
        entries: Mapping[str, AdapterEntry],
        reader: AdapterReader,
        texts: AdapterTexts,
        versions: Versions,
        quiet_s: float,
        keep_bytes: int,
        disk: DiskLevel,
    ) -> None:
        self._entries, self._reader, self._texts, self._versions = entries, reader, texts, versions
        self._quiet_s = quiet_s
        self._memory, self._disk = MemoryLevel(keep_bytes), disk
        self._files = ThreadPoolExecutor(2, "manylora-catalog", lower_priority)
        self.num_failures: Counter[str] = Counter()  # by error code
        self.publish: Callable[[Version, Adapter | FileAdapter, str], None] | None = None

    async def on_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._files, function, *arguments)

    async def close(self) -> None:
        reading = [entry.reading for entry in self._entries.values() if entry.reading is not None]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._files.shutdown)
        self._disk.close()

    async def read(self, entry: AdapterEntry) -> ReadAdapter:
        """All concurrent callers wait for the same read. Raises CatalogError."""
        if entry.reading is None:
            entry.reading = asyncio.create_task(self._read_once(entry))
            entry.reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Cancelling one caller must not cancel the read for the others.
        return await asyncio.shield(entry.reading)

    async def read_changed(self) -> None:
        """One after the other, so that requests that need an adapter at once do not wait for all of them."""
        for entry in list(self._entries.values()):
            quiet = time.monotonic() - entry.changed_at >= self._quiet_s or not entry.tried
            if entry.found and entry.found != entry.tried and quiet and entry.missing_since is None:
                try:
                    await self.read(entry)
                except CatalogError:
                    pass
                except Exception:  # the next ones are still read
                    logger.exception("reading adapter %s failed", entry.name)

    def announce(self, entry: AdapterEntry, read: ReadAdapter, number: int = 0) -> None:
        """Count and publish the version that an entry serves. number: of this version; 0: the next one."""
        if entry.version is None or self._entries.get(entry.name) is not entry:
            return
        number, old = self._versions.put(entry.name, entry.version.digest, number)
        entry.version = replace(entry.version, number=number)
        if old and self.publish is not None:
            self.publish(entry.version, read.adapter, old)

    async def copy(self, digest: str, path: Path | None) -> Adapter | FileAdapter | None:
        """The content with this digest, read without checking it: from memory, its files or disk."""
        return self._memory.get(digest) or await self.on_thread(
            lambda: self._find_stored(digest, path) or self._disk.get(digest)
        )

    async def free_memory(self) -> None:
        """Drop copies in memory of adapters that can be read from their files, and from disk after these."""
        for entry in list(self._entries.values()):
            digest = entry.version.digest if entry.version else ""
            if digest in self._memory:
                stored = await self.on_thread(self._find_stored, digest, entry.path)
                if stored is not None and await self.on_thread(self._disk.has, digest):
                    self._memory.drop(digest)

    def _find_stored(self, digest: str, path: Path | None) -> Adapter | FileAdapter | None:
        with contextlib.suppress(AdapterError, OSError):  # the copy may be good
            stored = None if path is None else self._reader.find_stored(path)
            if stored is not None and stored.adapter.digest == digest:
                return stored.adapter
        return None

    async def _read_once(self, entry: AdapterEntry) -> ReadAdapter:
        try:
            try:
                read, text = await self._read_quiet(entry)
            except CatalogError:
                raise
            except Exception as error:
                raise self._problem(entry, error) from error
            digest, facts, old = read.adapter.digest, read.facts, entry.version
            if old is None or old.digest != digest or old.text != text:
                entry.version = Version(entry.name, digest, task_id_of(digest), facts, int(time.time()), text)
                logger.info("adapter %s: %s, rank %d, %s", entry.name, facts.kind, facts.rank, digest[:12])
                self.announce(entry, read)
            entry.problem = None
            if isinstance(read.adapter, Adapter):
                # Digests that files no longer hold.
                orphans = {e.version.digest for e in self._entries.values() if e.version and e.problem}
                self._memory.put(read.adapter, orphans)
                await self.on_thread(self._disk.put_soon, read.adapter)
            return read
        finally:
            entry.reading = None

    async def _read_quiet(self, entry: AdapterEntry) -> tuple[ReadAdapter, AdapterText | None]:
        """Read files until they no longer change meanwhile. Raises AdapterError, CatalogError."""
        give_up = time.monotonic() + 2 * self._quiet_s + 1
        while True:
            entry.tried = before = await self.on_thread(fingerprint, entry.path)
            entry.note_files(before)
            failure: AdapterError | None = None
            try:  # the text first, because it is small
                text = await self.on_thread(self._texts.read, entry.name, entry.path)
                read = await self.on_thread(self._reader.read, entry.path)
            except AdapterError as error:
                failure = error
            if await self.on_thread(fingerprint, entry.path) == before:
                if failure is None:
                    return read, text
                if age_s(before) >= self._quiet_s:
                    raise failure
            if time.monotonic() > give_up:
                entry.tried = ()
                reason = f"adapter {entry.name!r} is being changed, try again"
                raise CatalogError("adapter_changing", reason, "model", retry_after=1)
            await asyncio.sleep(RETRY_S)

    def _problem(self, entry: AdapterEntry, error: Exception) -> CatalogError:
        """Note and log why a read failed. If that is temporary, the next scan reads the files again."""
        of_files = isinstance(error, AdapterError | OSError)
        if of_files and (is_passing(error) or is_passing(error.__cause__)):
            entry.tried = ()
            reason = f"adapter {entry.name!r} cannot be read at the moment, try again"
            problem = CatalogError("adapter_unreadable", reason, "model", retry_after=1)
        else:
            reason = str(error) if isinstance(error, AdapterError) else "its files cannot be read"
            if not of_files:
                logger.exception("reading adapter %s failed", entry.name)
                reason += f": {type(error).__name__}"
            problem = unusable(entry.name, reason)
        self.num_failures[problem.code] += 1
        if entry.problem is None or entry.problem.message != problem.message:
            goes_on = "; its last good version goes on serving" if entry.version else ""
            logger.warning("%s%s", problem.message, goes_on)
        entry.problem = problem
        return problem
