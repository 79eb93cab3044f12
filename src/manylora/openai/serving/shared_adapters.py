"""SharedAdapters: one catalog for several servers. Each follows the record that they have in one folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from manylora.lora.library.names import is_name
from manylora.openai.api.errors import ApiError, as_api_error
from manylora.openai.serving import watching
from manylora.openai.serving.adapter_entry import AdapterEntry
from manylora.openai.serving.adapter_record import (
    SUFFIX,
    AdapterRecord,
    Kept,
    sent_file,
    stamp_of,
    unwritable,
)
from manylora.openai.serving.catalog import AdapterCatalog
from manylora.openai.serving.pinning import Pinning

logger = logging.getLogger("manylora")

USED = ".used"  # a folder of empty files, whose times say when any server used an adapter last
LATE_S, RETRY_S = 5.0, 0.1  # for a change to be seen on a disk of the network
TRIES = 20  # of a file that is being replaced: renaming it is the last step of a change


@dataclass(frozen=True)
class State:
    """What a name means on one server. version, digest: of an adapter that can be served; else 0 and "".
    running: requests under way for one that was unloaded. problem: why it is not what was asked for."""

    revision: int
    version: int = 0
    digest: str = ""
    running: int = 0
    problem: str = ""


class SharedAdapters:
    """Belongs to the event loop. refresh_s: within which a change is seen that nobody has told of.

    A server that changes adapters does so in `changing`, and says with `note` which name now means something
    else. All others have it after `look`. So whatever several of them do at the same time, the record's last
    word holds for all.
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
        self._refresh_s = refresh_s
        self._followed: dict[str, Kept] = {}
        self._problems: dict[str, str] = {}  # by name
        self._lock = asyncio.Lock()
        self._touched: dict[str, float] = {}
        self._watching: asyncio.Task[None] | None = None
        self.changed = ""  # the name of the last `note`
        self.revision = 0  # of the record, as far as it was followed

    async def start(self) -> None:
        """Raises OSError where the record is not readable."""
        self._record.read()
        with contextlib.suppress(ApiError, OSError):
            async with self._record.locked():
                self._record.read()
                self._adopt()
        await self._follow(at_once=False)
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        await watching.end(self._watching)

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Nobody else changes adapters meanwhile, and earlier changes have been followed. Raises ApiError."""
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
        """Record what a name means here by now. Within `changing`. Raises ApiError."""
        self.changed = name
        try:
            self._record.set(name, self._kept(name))
        except OSError as error:
            logger.warning("what requests made of adapters cannot be kept: %s", error.strerror)
            raise unwritable(error) from error
        self._followed[name] = self._record.names[name]

    async def look(self, revision: int = 0) -> None:
        """Follow the record, to this revision at least; a disk of the network may show it late."""
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
        """Of a name that was changed. drain_s: that requests have when their adapter is unloaded."""
        kept, problem = self._record.names.get(name), self._problems.get(name, "")
        if kept is None or kept.kind in ("alias", "gone") or not self._catalog.has(name):
            gone = kept is None or kept.kind == "gone"
            running = await self._catalog.drained(name, drain_s) if gone else 0
            if not gone and kept is not None and kept.kind != "alias":
                problem = problem or "it has no such adapter"
            return State(self.revision, running=running, problem=problem)
        try:
            version = await self._catalog.version(name)
        except ApiError as error:
            return State(self.revision, problem=problem or error.message)
        if kept.terms.pinned and not self._pinning.is_pinned(name):
            problem = problem or self._pinning.problem(name)
        return State(self.revision, version.number, version.digest, problem=problem)

    def _kept(self, name: str) -> Kept:
        catalog, number = self._catalog, self._catalog.versions.number(name)
        if name in catalog.aliases:
            return Kept("alias", target=catalog.aliases.target(name), version=number)
        if not catalog.has(name):
            older = self._record.names.get(name)
            stamp = stamp_of(catalog.unloaded_files(name))
            if older is not None and older.kind in ("sent", "alias"):
                stamp = ()
            return Kept("gone", version=number, stamp=stamp)
        entry = catalog.entry(name)
        digest = "" if entry.version is None else entry.version.digest
        if entry.path == sent_file(self._folder, name).resolve():
            return Kept("sent", entry.terms, version=number, digest=digest)
        if entry.scanned:
            return Kept("found", entry.terms)
        return Kept("path", entry.terms, str(entry.path), number, digest)

    def _adopt(self) -> None:
        """Files that a server of its own has kept in the folder. Raises OSError."""
        for path in sorted(self._folder.rglob(f"*{SUFFIX}")):
            name = str(path.relative_to(self._folder).with_suffix(""))
            hidden = any(part.startswith(".") for part in Path(name).parts)
            if not hidden and is_name(name) and name not in self._record.names:
                self._record.set(name, Kept("sent"))

    async def _follow(self, *, at_once: bool = True) -> None:
        """at_once: read new adapters now, rather than when they are asked for."""
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
            except Exception as error:  # the other names are followed
                found = as_api_error(error)
                if found.code == "internal_error":
                    logger.exception("following the change of adapter %s failed", name)
                elif self._problems.get(name) != found.message:
                    logger.error("%s", found.message)
                self._problems[name] = found.message
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
            catalog.aliases.remove(name)
        entry = catalog.entry(name) if catalog.has(name) else None
        if kept.kind == "gone":
            if entry is not None and (not entry.scanned or kept.stamp == stamp_of(entry.found)):
                logger.info("adapter %s is unloaded, as a request has said", name)
                await catalog.unload(name, 0)
            catalog.versions.seed(name, kept.version)
        elif kept.kind == "found":
            if entry is not None:
                entry.terms = replace(kept.terms)
        else:
            await self._follow_files(name, kept, entry, at_once=at_once)

    async def _follow_files(
        self, name: str, kept: Kept, entry: AdapterEntry | None, *, at_once: bool
    ) -> None:
        """Raises ApiError."""
        catalog = self._catalog
        path = sent_file(self._folder, name) if kept.kind == "sent" else Path(kept.target)
        there = entry is not None and entry.path == path.resolve()
        if there and entry is not None and entry.version is not None and entry.version.digest == kept.digest:
            entry.terms = replace(kept.terms)
        elif entry is None and not at_once:
            catalog.put(name, path, replace(kept.terms))
            catalog.versions.seed(name, kept.version, kept.digest)
        else:
            for _ in range(TRIES):
                terms, number = replace(kept.terms), kept.version
                version = await catalog.load(name, str(path), replace=True, terms=terms, number=number)
                if kept.digest in ("", version.digest) or kept.kind == "path":
                    return
                await asyncio.sleep(RETRY_S / 2)
                if self._record.read():  # the file is a newer one, which comes next
                    return
            logger.warning("adapter %s: its file is not the one that was recorded, and is served", name)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s / 2)
            try:
                await self.look()
                await self._unload_idle()
            except Exception:
                logger.exception("following the record of adapters failed")

    async def _unload_idle(self) -> None:
        """An adapter with a time to live goes when no server has used it for so long."""
        for entry in [one for one in self._catalog.entries() if one.terms.idle_ttl_seconds is not None]:
            self._touch(entry)
            if not (entry.has_expired and self._is_idle(entry)):
                continue
            async with self.changing():
                if self._catalog.has(entry.name) and entry.has_expired and self._is_idle(entry):
                    logger.info("adapter %s is unloaded: it was idle for its time to live", entry.name)
                    await self._catalog.unload(entry.name, 0)
                    self.note(entry.name)
                    sent_file(self._folder, entry.name).unlink(missing_ok=True)
                    self._marker(entry.name).unlink(missing_ok=True)

    def _touch(self, entry: AdapterEntry) -> None:
        """Let others know when it was used here."""
        used = time.monotonic() if entry.num_open else entry.used_at
        if self._touched.get(entry.name) != used:
            self._touched[entry.name] = used
            with contextlib.suppress(OSError):
                marker = self._marker(entry.name)
                marker.parent.mkdir(exist_ok=True)
                marker.touch()

    def _is_idle(self, entry: AdapterEntry) -> bool:
        """Whether others have not used it either; each says so every half refresh_s."""
        with contextlib.suppress(OSError):
            idle_s = time.time() - self._marker(entry.name).stat().st_mtime
            return idle_s >= (entry.terms.idle_ttl_seconds or 0)
        return True

    def _marker(self, name: str) -> Path:
        return self._folder / USED / blake2b(name.encode(), digest_size=16).hexdigest()
