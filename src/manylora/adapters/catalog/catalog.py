"""AdapterCatalog: names to versions of adapters, read from folders that may change at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from manylora.adapters.catalog.entry import (
    AdapterEntry,
    CatalogError,
    EntryReader,
    Terms,
    Version,
    not_found,
    unusable,
)
from manylora.adapters.catalog.files import (
    NO_FOLDERS,
    Fingerprint,
    Found,
    find_adapters,
    fingerprint,
    folders_of,
    path_below,
)
from manylora.adapters.catalog.levels import DiskLevel
from manylora.adapters.catalog.names import MAX_ALIASES, Aliases, Versions, name_problem, targets_of
from manylora.adapters.catalog.reader import AdapterReader
from manylora.adapters.catalog.texts import AdapterTexts
from manylora.adapters.catalog.uploads import Uploads
from manylora.adapters.remote.files import SourceError
from manylora.adapters.remote.resolver import AdapterSources, Located, is_url
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.errors import AdapterError, ConfigError, printable
from manylora.generation.defaults import OwnText
from manylora.system.threads import Repeated

logger = logging.getLogger("manylora")

NO_ALIASES: Mapping[str, str] = MappingProxyType({})
MAX_QUIET_S = 1.0  # after the last change of files, before they are read


class AdapterCatalog:
    """Belongs to the event loop; files are read on threads, each adapter once at a time. num_failures: failed
    readings by error code. unloaded: the files of adapters that were unloaded, by name; they are not loaded
    again from a root until these change.

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
    versions:   counts the contents of each name; the engine's, where that is in this process.
    uploads:    uploaded adapters, whose paths no client may name. If they are shared with other servers,
                their files are read again only when `put` or `load` is called, and what nobody used for its
                time to live is unloaded by `SharedAdapters`.
    sources:    downloads what a request may name by URL.
    """

    def __init__(
        self,
        reader: AdapterReader,
        texts: AdapterTexts,
        roots: Sequence[Path] = (),
        allowed: Sequence[Path] = (),
        *,
        named: Mapping[str, Path] = NO_FOLDERS,
        refresh_s: float = 5.0,
        keep_bytes: int = 2**28,
        disk: DiskLevel | None = None,
        bases: Sequence[str] = (),
        paths: Sequence[str] = (),
        pinned: Sequence[str] = (),
        aliases: Mapping[str, str] = NO_ALIASES,
        versions: Versions | None = None,
        uploads: Uploads | None = None,
        sources: AdapterSources | None = None,
    ) -> None:
        self._sources = sources or AdapterSources()
        self._roots = [root.resolve() for root in roots]
        self._allowed = [*self._roots, *(root.resolve() for root in allowed)]
        self._uploads = uploads
        self._sent = [] if uploads is None or uploads.root is None else [uploads.root.resolve()]
        self._is_shared = uploads is not None and uploads.shared
        self._named, self._pinned = named, pinned
        self._refresh_s = refresh_s
        self._texts = texts
        self._bases, self._names_of_base = bases, (*bases, *paths)
        self.aliases = Aliases(aliases)
        self.versions = versions or Versions()
        self._entries: dict[str, AdapterEntry] = {}
        self._leaving: list[AdapterEntry] = []  # withdrawn, with requests under way
        self.unloaded: dict[str, Fingerprint] = {}
        here = [*self._allowed, *self._sent, *self._sources.roots]
        within = reader.within([*here, *folders_of(named.values())])
        quiet_s = min(MAX_QUIET_S, refresh_s / 4)
        disk = disk or DiskLevel(0)
        self._reader = EntryReader(self._entries, within, texts, self.versions, quiet_s, keep_bytes, disk)
        self.num_failures = self._reader.num_failures
        self._watching = Repeated(self._refresh, refresh_s / 2, "scanning the lora roots")

    def on_change(self, publish: Callable[[Version, Adapter | FileAdapter, str], None]) -> None:
        """Call this when a served name means other content: its new version, its adapter, the old digest."""
        self._reader.publish = publish

    async def start(self) -> None:
        """Take the named ones, scan the roots for the first time, and begin to watch them."""
        for name, path in self._named.items():
            found = await self._reader.on_thread(fingerprint, path)
            terms = Terms(pinned=name in self._pinned)
            self._entries[name] = AdapterEntry(name, path.resolve(), False, found, terms=terms)
        await self._scan()
        self._watching.start()

    async def close(self) -> None:
        await self._watching.close()
        await self._reader.close()

    def entries(self) -> list[AdapterEntry]:
        return sorted(self._entries.values(), key=lambda entry: entry.name)

    def has(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str, field: str = "lora_name") -> AdapterEntry:
        """field: of the request, that names it. Raises CatalogError."""
        if name not in self._entries:
            raise not_found(name, field)
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

        Raises CatalogError, the same one for a path outside and for one where nothing is.
        """
        if is_url(given):
            named = [entry.name for entry in self._entries.values() if entry.source == given]
            if not named:
                text = "lora_path: no adapter was loaded from there: POST /v1/load_lora_adapter loads it"
                raise CatalogError("adapter_not_found", text, "lora_path")
            return named[0]
        path, root = self._path_below(given)
        for entry in self._entries.values():
            if entry.path == path:
                return entry.name
        name = str(path.relative_to(root).with_suffix("") if path.is_file() else path.relative_to(root))
        taken = "another adapter is called so" if self.has(name) or name in self.aliases else ""
        if problem := name_problem(name, self._names_of_base) or taken:
            text = f"lora_path: the adapter there would be called {name!r}, but {problem}: ask for it by "
            text += "name, or have it loaded under another one (POST /v1/load_lora_adapter)"
            raise CatalogError("invalid_adapter_name", printable(text), "lora_path")
        self._entries[name] = AdapterEntry(name, path, scanned=False, found=fingerprint(path))
        return name

    def _path_below(self, given: str, more: Sequence[Path] = ()) -> tuple[Path, Path]:
        found = path_below([*self._allowed, *more], given)
        if found is None:
            reason = "lora_path: there is no adapter there that may be read: give a path below a folder of "
            reason += "--lora-root or --lora-allowed-path, absolute or relative to that folder"
            raise CatalogError("adapter_not_found", reason, "lora_path")
        return found

    async def _download(self, given: str) -> Located:
        """Raises CatalogError."""
        if not self._sources.allows(given):
            text = "lora_path: requests may name plain URLs below those of --lora-allowed-source only"
            raise CatalogError("not_allowed", text, "lora_path")
        locate = partial(self._sources.locate, given, by_request=True)
        try:
            return await asyncio.wrap_future(self._sources.in_background(locate))
        except ConfigError as error:
            code, retry_after = "adapter_broken", None
            if isinstance(error, SourceError) and (error.missing or error.passing):
                code = "adapter_not_found" if error.missing else "adapter_unreadable"
                retry_after = None if error.missing else 1
            raise CatalogError(code, f"lora_path: {error}", "lora_path", retry_after) from error

    async def version(self, name: str, *, fresh: bool = False) -> Version:
        """The current version of an adapter; waits for its first reading. fresh: checks its files now.

        Raises CatalogError for an unknown name, and when there never was a good version.
        """
        entry = self.entry(name, "model")
        if fresh:
            now = await self._reader.on_thread(fingerprint, entry.path)
            if now != entry.tried or entry.version is None:
                entry.note_files(now)
                await self._reader.read(entry)
            elif entry.problem is not None:
                raise entry.problem
        elif entry.version is None:
            if entry.problem is not None:
                raise entry.problem
            await self._reader.read(entry)
        assert entry.version is not None
        return entry.version

    async def text(self, name: str, *, fresh: bool = False) -> OwnText | None:
        """What comes with an adapter; None: the base model's text is its. Waits for its first reading only
        where something may come with it. Raises as `version`.
        """
        entry = self._entries.get(name)
        if entry is None or (entry.version is None and self._texts.source(name, entry.path) is None):
            return None
        text = (await self.version(name, fresh=fresh)).text
        if text is None:
            return None
        tokenizer = self._texts.tokenizer(text, wait=False)
        if tokenizer is None:
            try:
                tokenizer = await self._reader.on_thread(partial(self._texts.tokenizer, text, wait=True))
            except AdapterError as error:
                raise unusable(name, str(error)) from error
            assert tokenizer is not None
        return OwnText(tokenizer, text.defaults)

    async def adapter(self, version: Version) -> tuple[Version, Adapter | FileAdapter]:
        """The adapter of a version, or of the one that its files hold by now. Raises CatalogError."""
        entry = self._entries.get(version.name)
        found = await self._reader.copy(version.digest, None if entry is None else entry.path)
        if found is not None:
            return version, found
        if entry is None:
            raise not_found(version.name, "model")
        read = await self._reader.read(entry)
        assert entry.version is not None
        return entry.version, read.adapter

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
        """Whether a request may load an adapter of this name. Raises CatalogError."""
        self._check_name(name)
        if name in self.aliases or (name in self._entries and not replace):
            text = f"adapter {name!r} is loaded already: unload it first, or set load_inplace"
            if name in self.aliases:
                text = f"{name!r} is an alias: unload it first"
            raise CatalogError("adapter_exists", text, "lora_name")

    def _check_name(self, name: str) -> None:
        if problem := name_problem(name, self._names_of_base):
            reason = f"{name!r} cannot be the name of an adapter: {problem}"
            raise CatalogError("invalid_adapter_name", printable(reason), "lora_name")

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
        """Add an adapter on request. given: a path or URL. move: called with its path and its digest once it
        was read; returns its final path. number: of this version; 0: the next one. Raises CatalogError; then
        nothing has changed.
        """
        located = None
        if is_url(given):
            self.check_new(name, replace=replace)
            located = await self._download(given)
        path = self._path_below(given, self._sent)[0] if located is None else located.path
        self.check_new(name, replace=replace)  # another may have come meanwhile
        old = self._entries.get(name)
        found = await self._reader.on_thread(fingerprint, path)
        entry = AdapterEntry(name, path, False, found, terms=terms or Terms(), located=located)
        try:
            read = await self._reader.read(entry)
        except CatalogError:
            if located is not None:  # the traceback keeps it
                located.release()
            raise
        if move is not None:
            self.check_new(name, replace=replace)  # another may have come while this was read
            assert entry.version is not None
            entry.path = move(path, entry.version.digest)
            entry.found = entry.tried = await self._reader.on_thread(fingerprint, entry.path)
        if old is not None and old.scanned and old.path == entry.path:
            entry.scanned = True
        self.unloaded.pop(name, None)
        entry.used_at = time.monotonic()
        self._entries[name] = entry
        self._reader.announce(entry, read, number)
        assert entry.version is not None
        return entry.version

    def put(self, name: str, path: Path, terms: Terms) -> None:
        """Add an adapter that nobody has checked yet, in place of any: it is read when it is asked for.
        Raises CatalogError for a name that no adapter may have.
        """
        self._check_name(name)
        self.unloaded.pop(name, None)
        self._entries[name] = AdapterEntry(name, path.resolve(), False, fingerprint(path), terms=terms)

    def load_alias(self, name: str, target: str, *, replace: bool, later: bool = False) -> None:
        """Let a name stand for an adapter, an alias or the base model. replace: it may stand for another by
        now. later: what it stands for may come later. Raises CatalogError, and ValueError as `targets_of`."""
        self._check_name(name)
        if name in self._entries or (name in self.aliases and not replace):
            raise CatalogError("adapter_exists", f"{name!r} is a model's name already", "lora_name")
        for one, _ in targets_of(target):
            if self.aliases.leads_to(one, name):
                raise CatalogError("alias_circle", f"{one!r} stands for {name!r} already", "alias_of")
            if not later and (missing := self.missing(one)):
                raise not_found(missing[0], "alias_of")
        if not self.aliases.has_room_for(name):
            raise CatalogError("invalid_value", f"There are {MAX_ALIASES} aliases already", "alias_of")
        self.aliases[name] = target

    def missing(self, name: str) -> list[str]:
        """Of what a name stands for, what does not exist."""
        return [
            one for one in self.aliases.targets(name) if one not in self._entries and one not in self._bases
        ]

    async def unload(self, name: str, timeout_s: float) -> int:
        """Take no more requests for it and wait for those under way. Returns how many are left."""
        if name in self.aliases:
            del self.aliases[name]
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

    async def _refresh(self) -> None:
        await self._scan()
        await self._reader.read_changed()
        await self._reader.free_memory()

    def _withdraw(self, entry: AdapterEntry) -> None:
        """Until its files change."""
        self.unloaded[entry.name] = entry.found
        del self._entries[entry.name]
        self.versions.withdraw(entry.name)
        if entry.num_open:
            self._leaving.append(entry)

    async def _scan(self) -> None:
        """Unload what is idle for its time to live, and look at all roots and at the files of the entries
        that come from elsewhere. Of two adapters with one name the first one counts; uploaded ones, which
        are single files, come first.
        """
        for entry in [] if self._is_shared else list(self._entries.values()):
            if entry.has_expired:
                logger.info("adapter %s is unloaded: it was idle for its time to live", entry.name)
                self._withdraw(entry)
                if self._uploads is not None:
                    self._uploads.discard(entry.name)
        known = {entry.path: entry.found for entry in self._entries.values()}
        found: dict[str, Found] = {}
        complete = True
        sent = [] if self._is_shared else self._sent
        for root, only_files in [*((one, True) for one in sent), *((one, False) for one in self._roots)]:
            asked = root, known, self._allowed, self._names_of_base, only_files
            try:
                below = await self._reader.on_thread(find_adapters, *asked)
            except Exception as error:  # the other roots are scanned, and no adapter is withdrawn
                logger.warning("lora root: it cannot be scanned now: %s", error)
                complete = False
            else:
                for name, one in below.items():
                    if name not in self.aliases:
                        found.setdefault(name, one)
        for name, one in found.items():
            self._note_found(name, one)
        told = self._sent if self._is_shared else []
        for entry in list(self._entries.values()):
            if any(entry.path.is_relative_to(one) for one in told):
                continue
            if not entry.scanned:
                with contextlib.suppress(OSError):
                    now = await self._reader.on_thread(fingerprint, entry.path)
                    entry.note_files(now or entry.found)
            elif entry.name not in found and complete:
                self._note_missing(entry)

    def _note_found(self, name: str, found: Found) -> None:
        if self.unloaded.get(name) == found.fingerprint:
            return
        self.unloaded.pop(name, None)
        entry = self._entries.get(name)
        if entry is None:
            terms = Terms() if self._uploads is None else self._uploads.terms_of(found.path)
            self._entries[name] = AdapterEntry(name, found.path, True, found.fingerprint, terms=terms)
        elif entry.scanned:
            entry.missing_since = None
            entry.path = found.path
            entry.note_files(found.fingerprint)

    def _note_missing(self, entry: AdapterEntry) -> None:
        """Removed, or about to be replaced: a later scan decides."""
        now = time.monotonic()
        if entry.missing_since is None:
            entry.missing_since = now
        elif now - entry.missing_since >= self._refresh_s / 2:
            logger.info("adapter %s is withdrawn: its files are gone", entry.name)
            del self._entries[entry.name]
            self.versions.withdraw(entry.name)
