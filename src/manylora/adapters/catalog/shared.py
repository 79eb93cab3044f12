"""SharedAdapters: one catalog for several servers, which all follow a record in a shared folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from manylora.adapters.catalog.catalog import AdapterCatalog
from manylora.adapters.catalog.entry import AdapterEntry, CatalogError
from manylora.adapters.catalog.names import is_name
from manylora.adapters.catalog.pinning import Pinning
from manylora.adapters.catalog.uploads import (
    SUFFIX,
    AdapterRecord,
    Kept,
    sent_file,
    stamp_of,
    unwritable,
)
from manylora.adapters.remote.resolver import is_url
from manylora.errors import RequestError
from manylora.system.threads import Repeated

logger = logging.getLogger("manylora")

USED = ".used"  # folder of empty files; their times say when any server last used an adapter
LATE_S, RETRY_S = 5.0, 0.1  # for a change to become visible on a network file system
UNEXPECTED = "The server failed to answer this request"
TRIES = 20  # to read a file that is being replaced: the rename comes last


@dataclass(frozen=True)
class State:
    """What a name means on one server. version, digest: of an adapter that can be served; otherwise 0 and "".
    running: requests of an unloaded adapter that are still running. problem: why it is not what was asked
    for.
    """

    revision: int
    version: int = 0
    digest: str = ""
    running: int = 0
    problem: str = ""


class SharedAdapters:
    """Belongs to the event loop. refresh_s: time within which changes are seen without a notification.

    A server changes adapters within `changing`, and calls `note` with each name that now means something
    else. All other servers follow with `look`. Even after concurrent changes, the last word in the record
    holds for all.
    """

    def __init__(
        self,
        record: AdapterRecord,
        folder: Path,
        catalog: AdapterCatalog,
        pinning: Pinning,
        refresh_s: float,
    ) -> None:
        self._record, self._folder, self._catalog, self._pinning = record, folder, catalog, pinning
        self._followed: dict[str, Kept] = {}
        self._problems: dict[str, str] = {}  # by name
        self._lock = asyncio.Lock()
        self._touched: dict[str, float] = {}
        self._watching = Repeated(self._refresh, refresh_s / 2, "following the record of adapters")
        self.changed = ""  # the name of the last `note`
        self.revision = 0  # of the record, up to which it was followed

    async def start(self) -> None:
        """Raises OSError if the record is not readable."""
        self._record.read()
        with contextlib.suppress(CatalogError, OSError):
            async with self._record.locked():
                self._record.read()
                for path in sorted(self._folder.rglob(f"*{SUFFIX}")):  # left by a single server
                    name = str(path.relative_to(self._folder).with_suffix(""))
                    hidden = any(part.startswith(".") for part in Path(name).parts)
                    if not hidden and is_name(name) and name not in self._record.names:
                        self._record.set(name, Kept("sent"))
        await self._follow(at_once=False)
        self._watching.start()

    async def close(self) -> None:
        await self._watching.close()

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """No other server changes adapters meanwhile, and this one has followed. Raises CatalogError."""
        async with self._lock, self._record.locked():
            try:
                self._record.read(fresh=True)
            except OSError as error:
                raise unwritable(error) from error
            await self._follow()
            self.changed = ""
            try:
                yield
            finally:
                self.revision = self._record.revision

    def note(self, name: str) -> None:
        """Record what a name means here now. Call within `changing`. Raises CatalogError."""
        self.changed = name
        try:
            self._record.set(name, self._kept(name))
        except OSError as error:
            logger.warning("changes of adapters by requests cannot be recorded: %s", error.strerror)
            raise unwritable(error) from error
        self._followed[name] = self._record.names[name]

    async def look(self, revision: int = 0) -> None:
        """Follow the record, at least to this revision. A network file system may show it late."""
        end = time.monotonic() + LATE_S
        while True:
            async with self._lock:
                try:
                    self._record.read(fresh=self.revision < revision)
                except OSError as error:
                    logger.warning("the record of adapters cannot be read: %s", error.strerror)
                else:
                    await self._follow()
            if self.revision >= revision or time.monotonic() > end:
                return
            await asyncio.sleep(RETRY_S)

    async def state(self, name: str, drain_s: float) -> State:
        """State of a changed name. drain_s: time for running requests when their adapter is unloaded."""
        kept, problem = self._record.names.get(name), self._problems.get(name, "")
        if kept is None or kept.kind in ("alias", "gone") or not self._catalog.has(name):
            gone = kept is None or kept.kind == "gone"
            running = await self._catalog.drained(name, drain_s) if gone else 0
            if not gone and kept is not None and kept.kind != "alias":
                problem = problem or "it has no such adapter"
            return State(self.revision, running=running, problem=problem)
        try:
            version = await self._catalog.version(name)
        except CatalogError as error:
            return State(self.revision, problem=problem or error.message)
        if kept.terms.pinned and not self._pinning.is_pinned(name):
            problem = problem or self._pinning.problem(name)
        return State(self.revision, version.number, version.digest, problem=problem)

    def _kept(self, name: str) -> Kept:
        catalog, number = self._catalog, self._catalog.versions.number(name)
        if name in catalog.aliases:
            return Kept("alias", target=catalog.aliases[name], version=number)
        if not catalog.has(name):
            older = self._record.names.get(name)
            stamp = stamp_of(catalog.unloaded.get(name, ()))
            if older is not None and older.kind in ("sent", "alias"):
                stamp = ()
            return Kept("gone", version=number, stamp=stamp)
        entry = catalog.entry(name)
        digest = "" if entry.version is None else entry.version.digest
        if entry.path == sent_file(self._folder, name).resolve():
            return Kept("sent", entry.terms, version=number, digest=digest)
        if entry.scanned:
            return Kept("found", entry.terms)
        return Kept("path", entry.terms, entry.source or str(entry.path), number, digest)

    async def _follow(self, *, at_once: bool = True) -> None:
        """at_once: read new adapters now rather than at the first request."""
        wanted = dict(self._record.names)
        wanted |= {name: Kept("gone") for name in self._followed.keys() - wanted.keys()}
        changed = {name: kept for name, kept in wanted.items() if self._followed.get(name) != kept}
        for name, kept in changed.items():
            try:
                await self._follow_one(name, kept, at_once=at_once)
                self._problems.pop(name, None)
                self._followed[name] = kept
                if name not in self._record.names:
                    del self._followed[name]
            except Exception as error:  # continue with the other names
                problem = str(error)
                if not isinstance(error, RequestError):
                    logger.exception("following the change of adapter %s failed", name)
                    problem = UNEXPECTED
                elif self._problems.get(name) != problem:
                    logger.error("%s", problem)
                self._problems[name] = problem
        if changed:
            await self._pinning.follow()
        self.revision = self._record.revision

    async def _follow_one(self, name: str, kept: Kept, *, at_once: bool) -> None:
        catalog = self._catalog
        if kept.kind == "alias":
            if catalog.has(name):
                await catalog.unload(name, 0)
            catalog.load_alias(name, kept.target, replace=True, later=True)
            return
        if name in catalog.aliases:
            del catalog.aliases[name]
        entry = catalog.entry(name) if catalog.has(name) else None
        if kept.kind == "gone":
            if entry is not None and (not entry.scanned or kept.stamp == stamp_of(entry.found)):
                logger.info("adapter %s is unloaded, as requested on another server", name)
                await catalog.unload(name, 0)
            catalog.versions.seed(name, kept.version)
        elif kept.kind == "found":
            if entry is not None:
                entry.terms = replace(kept.terms)
        else:
            is_here = not is_url(kept.target)
            path = sent_file(self._folder, name) if kept.kind == "sent" else Path(kept.target)
            same = entry and (entry.path == path.resolve() if is_here else entry.source == kept.target)
            version = entry.version if entry is not None and same else None
            if entry is not None and version is not None and version.digest == kept.digest:
                entry.terms = replace(kept.terms)
            elif entry is None and not at_once and is_here:
                catalog.put(name, path, replace(kept.terms))
                catalog.versions.seed(name, kept.version, kept.digest)
            else:
                await self._load(name, kept, str(path) if is_here else kept.target)

    async def _load(self, name: str, kept: Kept, path: str) -> None:
        for _ in range(TRIES):
            terms, number = replace(kept.terms), kept.version
            version = await self._catalog.load(name, path, replace=True, terms=terms, number=number)
            if kept.digest in ("", version.digest) or kept.kind == "path":
                return
            await asyncio.sleep(RETRY_S / 2)
            if self._record.read():  # the file is newer: the next round follows it
                return
        logger.warning("adapter %s: its file differs from the recorded one; it is served anyway", name)

    async def _refresh(self) -> None:
        await self.look()
        await self._unload_idle()

    async def _unload_idle(self) -> None:
        """Unload adapters with a time to live that no server has used for that long."""
        for entry in [one for one in self._catalog.entries() if one.terms.idle_ttl_seconds is not None]:
            used = time.monotonic() if entry.num_open else entry.used_at
            if self._touched.get(entry.name) != used:  # tell the other servers
                self._touched[entry.name] = used
                with contextlib.suppress(OSError):
                    marker = self._marker(entry.name)
                    marker.parent.mkdir(exist_ok=True)
                    marker.touch()
            if not (entry.has_expired and self._is_idle(entry)):
                continue
            async with self.changing():
                if self._catalog.has(entry.name) and entry.has_expired and self._is_idle(entry):
                    logger.info("adapter %s is unloaded: it was idle for its time to live", entry.name)
                    await self._catalog.unload(entry.name, 0)
                    self.note(entry.name)
                    sent_file(self._folder, entry.name).unlink(missing_ok=True)
                    self._marker(entry.name).unlink(missing_ok=True)

    def _is_idle(self, entry: AdapterEntry) -> bool:
        """Whether the other servers have not used it either. Each records its use every half refresh_s."""
        with contextlib.suppress(OSError):
            idle_s = time.time() - self._marker(entry.name).stat().st_mtime
            return idle_s >= (entry.terms.idle_ttl_seconds or 0)
        return True

    def _marker(self, name: str) -> Path:
        return self._folder / USED / blake2b(name.encode(), digest_size=16).hexdigest()
