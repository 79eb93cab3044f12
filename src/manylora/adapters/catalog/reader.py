"""AdapterReader: reads adapters from files, and avoids repeating work for unchanged files."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from manylora.adapters.bounds import Bounds
from manylora.adapters.catalog.files import Fingerprint, fingerprint, is_settled
from manylora.adapters.extras import HEAD
from manylora.adapters.formats.manifest import check_manifest
from manylora.adapters.formats.read_options import DEFAULT, ReadOptions
from manylora.adapters.formats.safe_files import is_folder, is_plain, open_plain
from manylora.adapters.formats.sources import Source, find_source, read_lora, read_whole
from manylora.adapters.rules import NOTHING, AdapterRules
from manylora.adapters.tensors import Adapter, FileAdapter, FileRows, type_name
from manylora.errors import AdapterChangedError, AdapterInvalidError, printable
from manylora.kernels.loading import can_read

logger = logging.getLogger("manylora")

MAX_KNOWN = 8192  # folders with a known digest; beyond it the oldest are forgotten


@dataclass(frozen=True)
class AdapterFacts:
    """kind: as of `Source`. dtype: of the values as read. rank: the largest of any row. num_bytes:
    of all values. notes: warnings. labels: of its classification head; 0: none.
    """

    kind: str
    dtype: str
    rank: int
    num_bytes: int
    notes: tuple[str, ...] = ()
    labels: int = 0

    @classmethod
    def of(cls, kind: str, adapter: Adapter, notes: Sequence[str] = ()) -> AdapterFacts:
        dtype = type_name(adapter.rows[0].payload) if adapter.rows else "float32"
        rank = max((row.format.rank for row in adapter.rows), default=0)
        labels = next((len(one.values) for one in adapter.extras if one.name == f"{HEAD}.weight"), 0)
        told = (*notes, *([] if adapter.acts else [NOTHING]))
        return cls(kind, dtype, rank, adapter.nbytes, told, labels)


@dataclass(frozen=True, eq=False)
class ReadAdapter:
    """An adapter read from files, and facts about it."""

    adapter: Adapter | FileAdapter
    facts: AdapterFacts


@dataclass
class _Known:
    """A folder's files when they were read, and their content. rows: where they are in the file, if they can
    be read from there without anything else.
    """

    files: Fingerprint
    digest: str
    facts: AdapterFacts
    rows: FileRows | None


class AdapterReader:
    """Reads the adapters of one model. Thread-safe.

    rules: conditions for an adapter. options: with the modules in the order of the files. pages: dtype of the
    cache's pages, by torch's name, into which unchanged files may be read directly; "" for none.
    """

    def __init__(self, rules: AdapterRules, options: ReadOptions = DEFAULT, pages: str = "") -> None:
        self._rules, self._options, self._pages = rules, options, pages
        self._lock = threading.Lock()
        self._known: dict[Path, _Known] = {}

    def within(self, roots: Sequence[Path]) -> AdapterReader:
        """A reader for files in these folders only, even if links lead elsewhere."""
        options = replace(self._options, bounds=self._options.bounds.within(roots))
        return AdapterReader(self._rules, options, self._pages)

    def read(self, path: Path, source: Source | None = None) -> ReadAdapter:
        """source: the result of `find_source`, if it was called. Unchanged files are not digested again; if
        possible, they are read later, when their pages are known. Raises AdapterInvalidError.
        """
        try:
            return self.find_stored(path) or self._read(path, source or find_source(path))
        except OSError as error:
            raise AdapterInvalidError(f"its files cannot be read: {error.strerror}") from error

    def find_stored(self, path: Path) -> ReadAdapter | None:
        """Unchanged files that can be read straight into pages. Raises AdapterInvalidError, OSError."""
        known = self._unchanged(path)
        if known is None or not self._pages or known.facts.kind != "peft":
            return None
        if known.rows is None or not can_read(self._pages, known.rows.dtype):
            return None
        file = path if is_plain(path) else path / known.rows.file
        open_file = partial(_open, path, file, known.files, self._options.bounds)
        return ReadAdapter(FileAdapter(known.digest, known.rows, open_file), known.facts)

    def _unchanged(self, path: Path) -> _Known | None:
        with self._lock:
            known = self._known.get(path)
        return known if known is not None and fingerprint(path) == known.files else None

    def _read(self, path: Path, source: Source) -> ReadAdapter:
        known = self._unchanged(path)
        now, before = time.time_ns(), fingerprint(path)
        bounds, base = self._options.bounds, self._options.base
        model_dir = None if base is None else base.model_dir
        has_manifest = known is None and is_folder(path) and check_manifest(path, bounds, model_dir)
        notes: list[str] = []
        rows, digest = None, known.digest if known else None
        if source.has_rows:
            found = read_whole(source, replace(self._options, digest=digest is None, tell=notes.append))
            adapter, rows = self._rules.check_rows(found.rows, found.extras, digest), found.stored
        else:
            adapter = self._rules.check(read_lora(source, 0, self._options))
        after = fingerprint(path)
        if has_manifest and before != after:
            raise AdapterChangedError(path.name)
        if known is not None:
            if after == known.files:
                return ReadAdapter(adapter, known.facts)
            return self._read(path, source)  # the files changed, so the digest is outdated
        facts = AdapterFacts.of(source.kind, adapter, notes)
        for note in facts.notes:
            logger.warning("adapter %s: %s", printable(path.name), note)
        if is_settled(before, now) and before == after:
            with self._lock:
                self._known[path] = _Known(before, adapter.digest, facts, rows)
                if len(self._known) > MAX_KNOWN:
                    del self._known[next(iter(self._known))]
        return ReadAdapter(adapter, facts)


@contextmanager
def _open(place: Path, file: Path, known: Fingerprint, bounds: Bounds) -> Iterator[int]:
    """A descriptor of the file. Raises AdapterChangedError if the files of `place` (the adapter's folder or
    file) differ from `known` on entry or exit.
    """
    changed = AdapterChangedError(place.name if place == file else file.parent.name)
    try:
        if fingerprint(place) != known:
            raise changed
        descriptor = open_plain(file, bounds)
    except (OSError, AdapterInvalidError):
        raise changed from None
    try:
        yield descriptor
    except AdapterInvalidError:  # they were valid when they were read before
        raise changed from None
    finally:
        os.close(descriptor)
    if fingerprint(place) != known:
        raise changed
