"""AdapterSources resolves an adapter's path, hub id or URL to a folder on this machine and a digest."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from manylora.adapters.formats.manifest import KEY, MANIFEST, sha256_of
from manylora.adapters.remote.files import MARKS, MAX_FILES, SINGLE, RemoteFile, SourceError, is_read, unpack
from manylora.config.model_folder import HUB, hub_cache, is_hub_id, local_adapter
from manylora.errors import ConfigError, printable
from manylora.system.command_line import Progress, size
from manylora.system.folders import hold, remove_unless_held
from manylora.system.threads import lower_priority

logger = logging.getLogger("manylora")

SCHEMES = ("s3", "gs", "https", "http", "oci", "hf")
OWN = "manylora.adapter_sources"  # entry points: a scheme = function(url, folder), which fills the folder
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
PLAIN = re.compile(r"[\w.~:/@+=,-]+", re.ASCII)  # what a request may write after the scheme
CACHE_BYTES = 2**36
MAX_RECORDS = 2**12  # of URLs
AT_ONCE = 4  # downloads
WAITS_S = 0.5, 1.0  # before a file is asked for again
PART, ABANDONED_S = ".part-", 60.0  # folders of downloads; older ones that nobody holds are left over
Result = TypeVar("Result")


@dataclass(eq=False)
class Located:
    """path: the adapter's folder or file here. digest: of its files; "" for a folder of the user's. source:
    its URL without credentials; "": it was here. Its files are not evicted until `release`, or while this
    object lives.
    """

    path: Path
    digest: str = ""
    source: str = ""
    held: int = -1

    def release(self) -> None:
        if self.held >= 0:
            os.close(self.held)
        self.held = -1

    __del__ = release

    def __reduce__(self) -> tuple[Any, ...]:
        return Located, (self.path, self.digest, self.source)


def is_url(given: str | Path) -> bool:
    return URL.match(str(given)) is not None


def is_remote(given: str | Path) -> bool:
    """Whether it is a URL or a hub id, rather than a path."""
    return is_url(given) or is_hub_id(given)


def shown(url: str) -> str:
    """A URL or a text that has some, without user, password and query, which may be credentials."""
    return printable(re.sub(r"\?\S+", "?…", re.sub(r"//[^/\s]*@", "//", url)))


def _check_has_manifest(folder: Path) -> None:
    """Raises SourceError. A manifest that is there is checked when the adapter is read."""
    if KEY in os.environ and not (folder / MANIFEST).is_file():
        raise SourceError(f"it has no {MANIFEST}, which {KEY} asks for")


class AdapterSources:
    """Thread-safe, and processes may share the folder, which has a subfolder for each content.

    folder: of the downloads; None: manylora/adapters below XDG_CACHE_HOME. max_bytes: of the folder; the
    least recently used that nobody holds are deleted. allowed: prefixes of URLs that requests may name.
    hub: folder of the hub's own cache; None: that of HF_HOME.
    """

    def __init__(
        self, folder: Path | None = None, max_bytes: int = CACHE_BYTES, allowed: Sequence[str] = (),
        hub: Path | None = None,
    ) -> None:  # fmt: skip
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self._folder = (folder or cache / "manylora" / "adapters").absolute()
        self._max_bytes, self._hub = max_bytes, hub
        self._allowed = [one.rstrip("/") for one in allowed]
        self._lock = threading.Lock()  # held while these change
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._num_threads = 0

    @property
    def roots(self) -> list[Path]:
        """Folders that hold what was downloaded."""
        return [self._folder, hub_cache(self._hub)]

    def allows(self, url: str) -> bool:
        """Whether a request may name a URL: plainly, and below an allowed prefix."""
        rest = url.partition("://")[2]
        parts = rest.removesuffix("/").split("/")
        return PLAIN.fullmatch(rest) is not None and {"", ".", ".."}.isdisjoint(parts) and self._is_below(url)

    def _is_below(self, url: str) -> bool:
        """A tag or digest may follow a name in a registry. After a host it would be a port."""
        tagged = [one for one in self._allowed if one.startswith(("oci://", HUB)) and one.count("/") > 2]
        ends = [f"{one}/" for one in self._allowed] + [one + mark for one in tagged for mark in ":@"]
        return url in self._allowed or url.startswith(tuple(ends))

    def in_background(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call it on one of AT_ONCE threads, for which the process does not wait at its end."""
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.append((future, partial(function, *arguments)))
            if self._num_threads < AT_ONCE:
                self._num_threads += 1
                threading.Thread(target=self._work, name="manylora-download", daemon=True).start()
        return future

    def _work(self) -> None:
        lower_priority()
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                future, call = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # a result holds files

    def locate_all(self, given: Sequence[str]) -> list[Located]:
        """As `locate` for each, several at a time."""
        return [future.result() for future in [self.in_background(self.locate, one) for one in given]]

    def locate(self, given: str, *, by_request: bool = False) -> Located:
        """The folder or file of an adapter, downloaded if it is not in the cache. by_request: redirects stay
        on the server, or lead to an allowed one. Raises ConfigError; SourceError, if it cannot be had.
        """
        if not is_remote(given):
            return Located(Path(given).expanduser())
        scheme = given.partition("://")[0].lower() if is_url(given) else "hf"
        own = next((one for one in entry_points(group=OWN) if one.name == scheme), None)
        if own is None and scheme not in SCHEMES:
            known = ", ".join(f"{one}://" for one in SCHEMES)
            raise ConfigError(f"{shown(given)}: {scheme}:// is no source of adapters: give {known} or a path")
        name = shown(given)
        try:
            if scheme == "hf":
                path = local_adapter(given, None, self._hub, self._max_bytes)
                _check_has_manifest(path)
                return Located(path, f"commit:{path.name}", HUB + given.removeprefix(HUB))
            with self._record(given) as record:
                if own is None:
                    return self._current(self._store(scheme, by_request), given, record)
                with self._staging() as staging:
                    own.load()(given, staging)
                    return self._keep(staging, given, record, [])
        except SourceError as error:
            told = f"{name}: {shown(str(error))}"
            raise SourceError(told, passing=error.passing, missing=error.missing) from None
        except ImportError as error:
            told = f"{scheme}:// needs {error.name or error}: pip install 'manylora[sources]'"
            raise ConfigError(told) from error
        except Exception as error:
            if own is None and not isinstance(error, OSError):
                raise
            logger.error("%s cannot be stored in %s: %s", name, self._folder, shown(str(error)))
            told = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise SourceError(f"{name} cannot be had: {shown(told)}") from error

    def _store(self, scheme: str, by_request: bool) -> Any:
        if scheme == "oci":
            from manylora.adapters.remote.registry import Registry

            return Registry()
        from manylora.adapters.remote.file_store import FileStore

        return FileStore(scheme, self._is_below if by_request else lambda url: True)

    @contextmanager
    def _record(self, given: str) -> Iterator[dict[str, Any]]:
        """What is known of a URL; changes are stored. Others that want the same URL wait."""
        (self._folder / "sources").mkdir(parents=True, exist_ok=True)
        path = self._folder / "sources" / f"{hashlib.sha256(given.encode()).hexdigest()}.json"
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            record: dict[str, Any] = {}
            with suppress(ValueError, TypeError):
                record = dict(json.loads(file.read()))
            try:
                yield record
            finally:
                file.truncate(0)
                file.write(json.dumps(record))
                if not record:
                    path.unlink(missing_ok=True)

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        staging = Path(tempfile.mkdtemp(prefix=PART, dir=self._folder))
        held = hold(staging)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(held)

    def _current(self, store: Any, given: str, record: dict[str, Any]) -> Located:
        """store: finds and gets its files."""
        known = self._held(given, record)
        try:
            files: list[RemoteFile] = store.find(given)
        except SourceError as error:
            if not error.passing or known is None:
                raise
            logger.warning("%s: %s; what was downloaded before is used", shown(given), shown(str(error)))
            return known
        state = [[one.name, one.size, one.version] for one in files]
        if known is not None and record.get("state") == state and all(one.version for one in files):
            return known
        total, done = sum(one.size or 0 for one in files), 0  # done: those of further attempts, too
        self._check_size(len(files), total)
        self._make_room(total)
        with (
            self._staging() as staging,
            Progress("downloading", "downloaded", shown(given), total) as progress,
        ):

            def count(more: int) -> None:
                nonlocal done
                done += more
                self._check_size(len(files), done)
                progress.set(done)

            for number, file in enumerate(files):
                target = staging / (f".archive-{number}" if file.unpack else file.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                for wait_s in (*WAITS_S, None):
                    try:
                        store.get(file, target, count)
                        break
                    except SourceError as error:
                        if wait_s is None or not error.passing:
                            raise
                        time.sleep(wait_s)
                if file.unpack:
                    unpack(target, staging, self._max_bytes)
                    target.unlink()
            return self._keep(staging, given, record, state)

    def _check_size(self, num_files: int, num_bytes: int) -> None:
        """Raises SourceError."""
        if num_files > MAX_FILES or num_bytes > self._max_bytes:
            most = f"{MAX_FILES} files and {size(self._max_bytes)} (--lora-download-bytes) are the most"
            raise SourceError(f"it has {num_files} files of {size(num_bytes)}: {most}")

    def _keep(self, staging: Path, given: str, record: dict[str, Any], state: list[Any]) -> Located:
        """Move the one adapter below to the folder of its content, which is complete from then on."""
        every = [path for path in staging.rglob("*") if path.is_symlink() or not path.is_dir()]
        if any(path.is_symlink() or not path.is_file() for path in every):
            raise SourceError("it has a link, or what is no plain file")
        self._check_size(len(every), sum(path.stat().st_size for path in every))
        folders = {path.parent for path in every if path.name in MARKS or path.suffix == ".nemo"}
        folders = folders or {path.parent for path in every if path.suffix in SINGLE}
        if len(folders) != 1:
            found = ", ".join(sorted(str(one.relative_to(staging)) for one in folders)[:4])
            told = f"it has several adapters: {found}" if found else f"it has no {' or '.join(MARKS)}"
            raise SourceError(told, missing=not found)
        [folder] = folders
        _check_has_manifest(folder)
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                shutil.rmtree(path)
            elif is_read(path.name):
                digest.update(f"{sha256_of(path)}  {path.name}\n".encode())
            else:
                path.unlink()
        with suppress(OSError):  # it is there
            folder.rename(self._folder / digest.hexdigest())
        record |= {"state": state, "digest": digest.hexdigest(), "url": shown(given)}
        located = self._held(given, record)
        if located is None:
            raise SourceError("its files were deleted at once, try again", passing=True)
        self._make_room(0)
        return located

    def _held(self, given: str, record: dict[str, Any]) -> Located | None:
        """None: it is not in the cache."""
        folder = self._folder / str(record.get("digest", "none"))
        try:
            held = hold(folder)
        except OSError:
            return None
        os.utime(folder)
        files = list(folder.iterdir())
        path = files[0] if len(files) == 1 and files[0].suffix in SINGLE else folder
        return Located(path, f"sha256:{folder.name}", shown(given), held)

    def _make_room(self, needed: int) -> None:
        """Delete the least recently used until `needed` more bytes fit. Raises SourceError."""
        for left in self._folder.glob(f"{PART}*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    remove_unless_held(left)
        with suppress(OSError):  # another process deletes, too
            known = sorted((self._folder / "sources").iterdir(), key=lambda path: path.stat().st_mtime)
            for path in known[:-MAX_RECORDS]:
                path.unlink()
        found = []
        for folder in self._folder.glob("[0-9a-f]" * 64):
            with suppress(OSError):
                used = sum(file.stat().st_size for file in folder.iterdir())
                found.append((folder.stat().st_mtime, used, folder))
        total = sum(used for _, used, _ in found) + needed
        for _, used, folder in sorted(found):
            if total > self._max_bytes and remove_unless_held(folder):
                total -= used
        if total > self._max_bytes and needed:
            told = f"{size(needed)} do not fit beside adapters in use: unload some, or raise"
            raise SourceError(f"{told} --lora-download-bytes")
