"""AdapterCatalog: names to versions of adapters, read from folders that may change at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from manylora.errors import AdapterError, printable
from manylora.lora.catalog.files import Fingerprint, fingerprint, folders_of, path_below
from manylora.lora.catalog.levels import DiskLevel, MemoryLevel
from manylora.lora.catalog.names import MAX_ALIASES, Aliases, name_problem
from manylora.lora.catalog.reader import AdapterReader, ReadAdapter
from manylora.lora.catalog.versions import Versions
from manylora.lora.tensors import Adapter, FileAdapter
from manylora.lora.text.adapter_text import AdapterTexts
from manylora.lora.text.generation_defaults import GenerationDefaults
from manylora.openai.api.errors import ApiError, adapter_problem
from manylora.openai.serving.adapter_entry import AdapterEntry, EntryReader, Terms, Version
from manylora.openai.serving.root_scan import RootScanner
from manylora.openai.serving.waits import cancel_and_wait
from manylora.system.threads import lower_priority
from manylora.text.tokenizer import Tokenizer


class Copies:
    """Used on the event loop, except `find` and `is_needless`, which read files."""

    def __init__(self, reader: AdapterReader, memory: MemoryLevel, disk: DiskLevel) -> None:
        self._reader, self._memory, self._disk = reader, memory, disk

    def in_memory(self, digest: str) -> Adapter | FileAdapter | None:
        return self._memory.get(digest)

    def put_in_memory(self, adapter: Adapter, orphans: Set[str]) -> None:
        """orphans: digests that files no longer hold."""
        self._memory.put(adapter, set(orphans))

    def drop(self, digest: str) -> None:
        """Drop the copy in memory."""
        self._memory.drop(digest)

    def find(self, digest: str, path: Path | None) -> Adapter | FileAdapter | None:
        """From its files, if they can be read without checking their content. Otherwise from the copy on
        disk.
        """
        return self._find_stored(digest, path) or self._disk.get(digest)

    def is_needless(self, digest: str, path: Path) -> bool:
        """Whether it is in memory although its files can be read directly into the cache and a copy on disk
        survives them.
        """
        return (
            digest in self._memory and self._find_stored(digest, path) is not None and self._disk.has(digest)
        )

    def _find_stored(self, digest: str, path: Path | None) -> Adapter | FileAdapter | None:
        with contextlib.suppress(AdapterError, OSError):  # the copy may be good
            stored = None if path is None else self._reader.find_stored(path)
            if stored is not None and stored.adapter.digest == digest:
                return stored.adapter
        return None


logger = logging.getLogger("manylora")

Result = TypeVar("Result")

NONE: Mapping[str, Path] = MappingProxyType({})
MAX_QUIET_S = 1.0  # after the last change of files, before they are read


class AdapterCatalog:
    """Belongs to the event loop; files are read on threads of its own, each adapter once at a time.

    texts:      reads the template, defaults and tokenizer that come with an adapter.
    roots:      scanned for adapters. allowed: more folders in which a client may name adapters by path.
    named:      adapters by name, wherever they lie; no client may name these paths.
    refresh_s:  seconds within which a changed adapter serves; the roots are scanned twice in this time.
    keep_bytes: of tensors held in memory, of adapters that the engine's cache may evict and that could not
                be read again.
    disk:       copies of what was read, so that a version outlives its files.
    bases:      names of the base model. paths: further ones, which no alias may stand for.
    pinned:     names, among `named`, of adapters that stay in the engine's cache.
    aliases:    name -> what it stands for.
    expired:    called with the name of an adapter that was unloaded because nobody used it for its time to
                live; None: such adapters are unloaded by someone else, and not here.
    terms_of:   the terms of an adapter that is found at a path below a root.
    versions:   counts the contents of each name; the engine's, where that is in this process.
    uploads:    folder of uploaded adapters, whose paths no client may name. shared: with other servers; its
                files are read again only when `put` or `load` is called.
    """

    def __init__(
        self,
        reader: AdapterReader,
        texts: AdapterTexts,
        roots: Sequence[Path] = (),
        allowed: Sequence[Path] = (),
        *,
        named: Mapping[str, Path] = NONE,
        refresh_s: float = 5.0,
        keep_bytes: int = 2**28,
        disk: DiskLevel | None = None,
        bases: Sequence[str] = (),
        paths: Sequence[str] = (),
        pinned: Sequence[str] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
        expired: Callable[[str], None] | None = lambda name: None,
        terms_of: Callable[[Path], Terms] = lambda path: Terms(),
        versions: Versions | None = None,
        uploads: Path | None = None,
        shared: bool = False,
    ) -> None:
        scanned = [root.resolve() for root in roots]
        self._allowed = [*scanned, *(root.resolve() for root in allowed)]
        self._uploads = [] if uploads is None else [uploads.resolve()]
        self._reader = reader.within([*self._allowed, *self._uploads, *folders_of(named.values())])
        self._named = named
        self._refresh_s = refresh_s
        self._quiet_s = min(MAX_QUIET_S, refresh_s / 4)
        self._texts = texts
        given = self._on_thread, self._quiet_s, self._keep, self._announce
        self._entry_reader = EntryReader(self._reader, texts, *given)
        self.versions = versions or Versions()
        # Called when a name that was served means another content: with its adapter, and the old digest.
        self.on_change: Callable[[Version, Adapter | FileAdapter, str], None] = lambda *_: None
        self._bases, self._names_of_base = bases, (*bases, *paths)
        self._pinned, self._expired = pinned, expired
        self.aliases = Aliases(aliases)
        self._entries: dict[str, AdapterEntry] = {}
        self._leaving: list[AdapterEntry] = []  # withdrawn, with requests under way
        self._scanner = RootScanner(
            self._entries,
            scanned,
            self._allowed,
            self._names_of_base,
            uploads=[] if shared else self._uploads,
            told=self._uploads if shared else [],
            missing_s=refresh_s / 2,
            on_thread=self._on_thread,
            may_have=lambda name: name not in self.aliases,
            terms_of=terms_of,
            gone=self.versions.withdraw,
        )
        self.disk = disk or DiskLevel(0)
        self._copies = Copies(self._reader, MemoryLevel(keep_bytes), self.disk)
        self._files = ThreadPoolExecutor(2, "manylora-catalog", lower_priority)
        self._watching: asyncio.Task[None] | None = None
        self.num_failures = self._entry_reader.num_failures

    async def start(self) -> None:
        """Take the named ones, scan the roots for the first time, and begin to watch them."""
        for name, path in self._named.items():
            found = await self._on_thread(fingerprint, path)
            terms = Terms(pinned=name in self._pinned)
            self._entries[name] = AdapterEntry(name, path.resolve(), False, found, terms=terms)
        await self._scanner.scan()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        await cancel_and_wait(self._watching)
        reading = [entry.reading for entry in self._entries.values() if entry.reading is not None]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._files.shutdown)
        self.disk.close()

    def entries(self) -> list[AdapterEntry]:
        return sorted(self._entries.values(), key=lambda entry: entry.name)

    def has(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str, field: str = "lora_name") -> AdapterEntry:
        """field: of the request, that names it. Raises ApiError 404."""
        if name not in self._entries:
            raise _unknown(name, field)
        return self._entries[name]

    def owner_of(self, name: str) -> str:
        """Of an adapter that is no one else's to see; "": it has none, or is public."""
        terms = self._entries[name].terms if name in self._entries else Terms()
        return "" if terms.public else terms.owner

    def owned_by(self, owner: str) -> list[AdapterEntry]:
        return [entry for entry in self._entries.values() if entry.terms.owner == owner]

    def names_of(self, task_id: int) -> list[str]:
        """Equal contents share an id."""
        return [e.name for e in self._entries.values() if e.version and e.version.task_id == task_id]

    def name_of_path(self, given: str) -> str:
        """The name of the adapter at a path below the allowed folders; a new one is added to the catalog.

        Raises ApiError, the same one for a path outside and for one where nothing is.
        """
        path, root = self._path_below(given)
        for entry in self._entries.values():
            if entry.path == path:
                return entry.name
        name = str(path.relative_to(root).with_suffix("") if path.is_file() else path.relative_to(root))
        if problem := self._unusable(name):
            text = f"lora_path: the adapter there would be called {name!r}, but {problem}: ask for it by "
            text += "name, or have it loaded under another one (POST /v1/load_lora_adapter)"
            raise ApiError(400, "invalid_adapter_name", printable(text), "lora_path")
        self._entries[name] = AdapterEntry(name, path, scanned=False, found=fingerprint(path))
        return name

    def _path_below(self, given: str, more: Sequence[Path] = ()) -> tuple[Path, Path]:
        found = path_below([*self._allowed, *more], given)
        if found is None:
            reason = "lora_path: there is no adapter there that may be read: give a path below a folder of "
            reason += "--lora-root or --lora-allowed-path, absolute or relative to that folder"
            raise ApiError(404, "adapter_not_found", reason, "lora_path")
        return found

    def _unusable(self, name: str) -> str:
        """Why a new adapter cannot have this name; "": it can."""
        taken = name in self._entries or name in self.aliases
        return name_problem(name, self._names_of_base) or ("another adapter is called so" if taken else "")

    async def version(self, name: str, *, fresh: bool = False) -> Version:
        """The current version of an adapter; waits for its first reading. fresh: checks its files now.

        Raises ApiError: 404 for an unknown name, 422 when there never was a good version.
        """
        entry = self.entry(name, "model")
        if fresh:
            now = await self._on_thread(fingerprint, entry.path)
            if now != entry.tried or entry.version is None:
                entry.note_files(now)
                await self._entry_reader.read(entry)
            elif entry.problem is not None:
                raise entry.problem
        elif entry.version is None:
            if entry.problem is not None:
                raise entry.problem
            await self._entry_reader.read(entry)
        assert entry.version is not None
        return entry.version

    async def text(self, name: str, *, fresh: bool = False) -> tuple[Tokenizer, GenerationDefaults] | None:
        """What comes with an adapter; None: the base model's text is its. Waits for its first reading only
        where something may come with it. Raises as `version`."""
        entry = self._entries.get(name)
        if entry is None or (entry.version is None and self._texts.source(name, entry.path) is None):
            return None
        text = (await self.version(name, fresh=fresh)).text
        if text is None:
            return None
        tokenizer = self._texts.tokenizer(text, wait=False)
        if tokenizer is None:
            try:
                tokenizer = await self._on_thread(partial(self._texts.tokenizer, text, wait=True))
            except AdapterError as error:
                raise adapter_problem(name, str(error)) from error
            assert tokenizer is not None
        return tokenizer, text.defaults

    async def adapter(self, version: Version) -> tuple[Version, Adapter | FileAdapter]:
        """The adapter of a version, or of the one that its files hold by now. Raises ApiError."""
        entry = self._entries.get(version.name)
        path = None if entry is None else entry.path
        found = self._copies.in_memory(version.digest) or await self._on_thread(
            self._copies.find, version.digest, path
        )
        if found is not None:
            return version, found
        if entry is None:
            raise _unknown(version.name, "model")
        read = await self._entry_reader.read(entry)
        assert entry.version is not None
        return entry.version, read.adapter

    def unloaded_files(self, name: str) -> Fingerprint:
        """Of an adapter that was unloaded: it is not loaded again from a root until these change."""
        return self._scanner.unloaded.get(name, ())

    def enter(self, name: str) -> AdapterEntry | None:
        """Count a request in; None for a name that is gone."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.num_open += 1
            entry.used_at = time.monotonic()
        return entry

    def leave(self, entry: AdapterEntry) -> None:
        entry.num_open -= 1
        entry.used_at = time.monotonic()
        if entry.num_open == 0 and self._entries.get(entry.name) is not entry:
            entry.closed.set()
            self._leaving = [one for one in self._leaving if one is not entry]

    def check_new(self, name: str, *, replace: bool) -> None:
        """Whether a request may load an adapter of this name. Raises ApiError."""
        self._check_name(name)
        if name in self.aliases or (name in self._entries and not replace):
            text = f"adapter {name!r} is loaded already: unload it first, or set load_inplace"
            if name in self.aliases:
                text = f"{name!r} is an alias: unload it first"
            raise ApiError(400, "adapter_exists", text, "lora_name")

    def _check_name(self, name: str) -> None:
        """Raises ApiError."""
        if problem := name_problem(name, self._names_of_base):
            reason = f"{name!r} cannot be the name of an adapter: {problem}"
            raise ApiError(400, "invalid_adapter_name", printable(reason), "lora_name")

    async def load(
        self,
        name: str,
        given: str,
        *,
        replace: bool,
        move: Callable[[Path, str], Path] | None = None,
        terms: Terms | None = None,
        number: int = 0,
    ) -> Version:
        """Add an adapter on request. Raises ApiError; then nothing has changed.

        move: called with its path and its digest once the adapter was read without an error; returns its
        final path. number: of this version; 0: the next one.
        """
        path, _ = self._path_below(given, self._uploads)
        self.check_new(name, replace=replace)
        old = self._entries.get(name)
        found = await self._on_thread(fingerprint, path)
        entry = AdapterEntry(name, path, False, found, terms=terms or Terms())
        read = await self._entry_reader.read(entry)
        if move is not None:
            self.check_new(name, replace=replace)  # another may have come while this was read
            assert entry.version is not None
            entry.path = move(path, entry.version.digest)
            entry.found = entry.tried = await self._on_thread(fingerprint, entry.path)
        if old is not None and old.scanned and old.path == entry.path:
            entry.scanned = True
        self._scanner.unloaded.pop(name, None)
        entry.used_at = time.monotonic()
        self._entries[name] = entry
        self._announce(entry, read, number)
        assert entry.version is not None
        return entry.version

    def put(self, name: str, path: Path, terms: Terms) -> None:
        """Add an adapter that nobody has checked yet, in place of any: it is read when it is asked for.
        Raises ApiError for a name that no adapter may have.
        """
        self._check_name(name)
        self._scanner.unloaded.pop(name, None)
        self._entries[name] = AdapterEntry(name, path.resolve(), False, fingerprint(path), terms=terms)

    def _announce(self, entry: AdapterEntry, read: ReadAdapter, number: int = 0) -> None:
        """Count the version of an entry that serves, and tell of one that took another's place."""
        if entry.version is None or self._entries.get(entry.name) is not entry:
            return
        number, old = self.versions.put(entry.name, entry.version.digest, number)
        entry.version = changed(entry.version, number=number)
        if old:
            self.on_change(entry.version, read.adapter, old)

    def load_alias(self, name: str, target: str, *, replace: bool, later: bool = False) -> None:
        """Let a name stand for an adapter, an alias or the base model. replace: it may stand for another by
        now. later: what it stands for may come later. Raises ApiError."""
        self._check_name(name)
        if name in self._entries or (name in self.aliases and not replace):
            raise ApiError(400, "adapter_exists", f"{name!r} is a model's name already", "lora_name")
        meant = self.aliases.resolve(target)
        if not later and meant not in self._entries and meant not in self._bases:
            raise _unknown(target, "alias_of")
        if self.aliases.leads_to(target, name):
            raise ApiError(400, "alias_circle", f"{target!r} stands for {name!r} already", "alias_of")
        if not self.aliases.has_room_for(name):
            raise ApiError(400, "invalid_value", f"There are {MAX_ALIASES} aliases already", "alias_of")
        self.aliases.set(name, target)

    async def unload(self, name: str, timeout_s: float) -> int:
        """Take no more requests for it and wait for those under way. Returns how many are left. Of an alias
        only the name goes."""
        if name in self.aliases:
            self.aliases.remove(name)
            return 0
        self._withdraw(self.entry(name))
        return await self.drained(name, timeout_s)

    async def drained(self, name: str, timeout_s: float) -> int:
        """Wait for requests of adapters of this name that are unloaded. Returns how many are left."""
        leaving = [entry for entry in self._leaving if entry.name == name]
        if leaving:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*(one.closed.wait() for one in leaving)), timeout_s)
        return sum(entry.num_open for entry in leaving)

    async def _watch(self) -> None:
        while True:
            try:
                if self._expired is not None:
                    self._unload_expired(self._expired)
                await self._scanner.scan()
                await self._read_changed()
                await self._free_memory()
            except Exception:
                logger.exception("scanning the lora roots failed")
            await asyncio.sleep(self._refresh_s / 2)

    def _unload_expired(self, expired: Callable[[str], None]) -> None:
        for entry in [one for one in self._entries.values() if one.has_expired]:
            logger.info("adapter %s is unloaded: it was idle for its time to live", entry.name)
            self._withdraw(entry)
            expired(entry.name)

    def _withdraw(self, entry: AdapterEntry) -> None:
        """Until its files change."""
        self._scanner.unloaded[entry.name] = entry.found
        del self._entries[entry.name]
        self.versions.withdraw(entry.name)
        if entry.num_open:
            self._leaving.append(entry)

    async def _read_changed(self) -> None:
        """One after the other, so that requests that need an adapter at once do not wait for all of them."""
        for entry in list(self._entries.values()):
            quiet = time.monotonic() - entry.changed_at >= self._quiet_s or not entry.tried
            if entry.found and entry.found != entry.tried and quiet and entry.missing_since is None:
                try:
                    await self._entry_reader.read(entry)
                except ApiError:
                    pass
                except Exception:  # the next ones are still read
                    logger.exception("reading adapter %s failed", entry.name)

    async def _keep(self, read: ReadAdapter) -> None:
        if isinstance(read.adapter, Adapter):
            orphans = {e.version.digest for e in self._entries.values() if e.version and e.problem}
            self._copies.put_in_memory(read.adapter, orphans)
            await self._on_thread(self.disk.put_soon, read.adapter)

    async def _free_memory(self) -> None:
        """Hold nothing that can come back without: a second copy of what is in the cache or in the files."""
        for entry in list(self._entries.values()):
            digest = entry.version.digest if entry.version else ""
            if await self._on_thread(self._copies.is_needless, digest, entry.path):
                self._copies.drop(digest)

    async def _on_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._files, function, *arguments)


def _unknown(name: str, field: str) -> ApiError:
    return ApiError(404, "adapter_not_found", f"adapter {name!r} does not exist", field)
