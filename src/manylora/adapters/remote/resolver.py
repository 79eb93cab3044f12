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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from manylora.adapters.formats.manifest import KEY, MANIFEST, MAX_BYTES, sha256_of
from manylora.adapters.remote.archives import unpack
from manylora.adapters.remote.files import MARKS, MAX_FILES, SINGLE, RemoteFile, SourceError, is_read
from manylora.config.hub import HUB, hub_cache, is_hub_id, local_adapter
from manylora.config.settings import readable
from manylora.errors import ConfigError, printable
from manylora.system.folders import hold, remove_unless_held
from manylora.system.progress import Progress, size
from manylora.system.threads import lower_priority

logger = logging.getLogger("manylora")

SCHEMES = ("s3", "gs", "https", "http", "oci", "hf")
OWN = "manylora.adapter_sources"  # group of entry points: scheme = function(source, folder), which fills it
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
NAMED = re.compile(r"[\w.~:/@+=,-]+", re.ASCII)  # what a request may write after the scheme
CACHE_BYTES = 2**36
AT_ONCE = 4  # downloads
TRIES, RETRY_S = 3, 0.5
PART, ABANDONED_S = ".part-", 60.0  # folders of downloads, after whose age a killed process made them
NOTHING = f"it has no {' or '.join(MARKS)}"
Result = TypeVar("Result")


@dataclass(eq=False)
class Located:
    """path: the adapter's folder or file here. digest: of its files; "" for a folder of the user's. source:
    its URL without credentials; "": it was here. Its files are not evicted while this object lives.
    """

    path: Path
    digest: str = ""
    source: str = ""
    held: int = -1

    def __del__(self) -> None:
        if self.held >= 0:
            os.close(self.held)

    def __reduce__(self) -> tuple[Any, ...]:
        return Located, (self.path, self.digest, self.source)


def is_remote(given: str | Path) -> bool:
    """Whether it is a URL or a hub id, rather than a path."""
    return is_url(given) or is_hub_id(given)


def is_url(given: str | Path) -> bool:
    return SCHEME.match(str(given)) is not None


def shown(source: str) -> str:
    """A source without user, password and query, which may be credentials."""
    parts = urlsplit(source)
    host = parts.netloc.rpartition("@")[2]
    return printable(parts._replace(netloc=host, query="…" if parts.query else "", fragment="").geturl())


class AdapterSources:
    """Thread-safe, and processes may share the folder, which has a subfolder for each content.

    folder: of the downloads; None: manylora/adapters below XDG_CACHE_HOME. max_bytes: of the folder; the
    least recently used that nobody holds are deleted. allowed: prefixes of sources that requests may name.
    hub: folder of the hub's own cache; None: that of HF_HOME.
    """

    def __init__(
        self,
        folder: Path | None = None,
        max_bytes: int = CACHE_BYTES,
        allowed: Sequence[str] = (),
        hub: Path | None = None,
    ) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self._folder = (folder or cache / "manylora" / "adapters").absolute()
        self._max_bytes, self._hub = max_bytes, hub
        self._allowed = [one.rstrip("/") for one in allowed]
        self._turns = threading.BoundedSemaphore(AT_ONCE)

    @property
    def roots(self) -> list[Path]:
        """Folders that hold what was downloaded."""
        return [self._folder, hub_cache(self._hub)]

    def allows(self, source: str) -> bool:
        """Whether a request may name a source: plainly, and below an allowed prefix."""
        rest = source.partition("://")[2]
        parts = rest.removesuffix("/").split("/")
        return (
            NAMED.fullmatch(rest) is not None and {"", ".", ".."}.isdisjoint(parts) and self._is_below(source)
        )

    def _is_below(self, source: str) -> bool:
        """A tag or digest may follow a name in a registry. After a host it would be a port."""
        tagged = [one for one in self._allowed if one.startswith(("oci://", HUB)) and one.count("/") > 2]
        ends = [f"{one}/" for one in self._allowed] + [one + mark for one in tagged for mark in ":@"]
        return source in self._allowed or source.startswith(tuple(ends))

    def in_background(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call it on a thread that the process does not wait for at its end, AT_ONCE at a time."""
        future: Future[Result] = Future()

        def run() -> None:
            lower_priority()
            with self._turns:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=run, name="manylora-download", daemon=True).start()
        return future

    def locate_all(self, given: Sequence[tuple[str, Path | None]]) -> list[Located]:
        """As `locate` for each, several at a time."""
        found: list[Located] = []
        for start in range(0, len(given), AT_ONCE):
            some = given[start : start + AT_ONCE]
            futures = [self.in_background(self.locate, *one) if is_remote(one[0]) else None for one in some]
            found += [f.result() if f else self.locate(*one) for one, f in zip(some, futures, strict=True)]
        return found

    def locate(self, given: str, manifest: Path | None = None, *, by_request: bool = False) -> Located:
        """The folder or file of an adapter, downloaded if it is not in the cache. manifest: a file to enforce
        instead of the source's own. by_request: redirects stay on the server, or lead to an allowed one.

        Raises ConfigError; SourceError, if it cannot be had.
        """
        scheme = given.partition("://")[0].lower() if is_url(given) else ""
        if manifest is not None and scheme in ("", "hf"):
            raise ConfigError(f"{given}: a manifest of its own is for URLs: put {MANIFEST} beside its files")
        if not is_remote(given):
            return Located(Path(given).expanduser())
        if scheme in ("", "hf"):
            path = local_adapter(given, None, self._hub, self._max_bytes)
            return Located(path, f"commit:{path.name}", HUB + given.removeprefix(HUB))
        if scheme not in SCHEMES and not self._own(scheme):
            known = ", ".join(f"{one}://" for one in SCHEMES)
            raise ConfigError(f"{shown(given)}: {scheme}:// is no source of adapters: give {known} or a path")
        with readable(Path()):
            own = b"" if manifest is None else manifest.read_bytes()[: MAX_BYTES + 1]
        try:
            with self._record(given, own) as record:
                return self._current(scheme, given, own, record, by_request)
        except SourceError as error:
            told = f"{shown(given)}: {_plain(error, given)}"
            raise SourceError(told, passing=error.passing, missing=error.missing) from None
        except ImportError as error:
            what = f"{scheme}:// needs {error.name or error}"
            raise ConfigError(f"{what}: pip install 'manylora[sources]'") from error
        except OSError as error:
            logger.error("%s cannot be stored in %s: %s", shown(given), self._folder, error)
            raise SourceError(f"{shown(given)} cannot be stored: {error.strerror or error}") from error

    @contextmanager
    def _record(self, given: str, manifest: bytes) -> Iterator[dict[str, Any]]:
        """What is known of a source; changes are stored. Others that want the same source wait."""
        name = hashlib.sha256(given.encode() + b"\n" + manifest).hexdigest()
        (self._folder / "sources").mkdir(parents=True, exist_ok=True)
        with (self._folder / "sources" / f"{name}.json").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            record: dict[str, Any] = {}
            with suppress(ValueError):
                record = dict(json.loads(file.read() or "{}"))
            before = dict(record)
            yield record
            if record != before:
                file.truncate(0)
                file.write(json.dumps(record))

    def _current(
        self, scheme: str, given: str, manifest: bytes, record: dict[str, Any], by_request: bool
    ) -> Located:
        own = self._own(scheme)
        store = None if own else self._store(scheme, by_request)
        try:
            files = [] if store is None else store.find(given)
        except SourceError as error:
            found = self._held(given, record)
            if not error.passing or found is None:
                raise
            logger.warning("%s: %s; what was downloaded before is used", shown(given), _plain(error, given))
            return found
        state = [[one.name, one.size, one.version] for one in files]
        is_known = bool(files) and all(one.version for one in files) and record.get("state") == state
        if is_known and (found := self._held(given, record)) is not None:
            return found
        total = sum(one.size or 0 for one in files)
        self._check_size(len(files), total)
        self._make_room(total)
        staging = Path(tempfile.mkdtemp(prefix=PART, dir=self._folder))
        held = hold(staging)
        try:
            if own is None:
                self._download(store, files, given, staging, total)
            else:
                try:
                    own(given, staging)
                except Exception as error:
                    raise SourceError(f"{scheme}:// failed: {type(error).__name__}: {error}") from error
            folder = self._adapter_folder(staging)
            if manifest:
                (folder / MANIFEST).write_bytes(manifest)
            if KEY in os.environ and not (folder / MANIFEST).is_file():
                raise SourceError(f"it has no {MANIFEST}, which {KEY} asks for")
            record |= {"state": state, "digest": self._keep(folder), "source": shown(given)}
            found = self._held(given, record)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(held)
        if found is None:
            raise SourceError("its files were deleted at once, try again", passing=True)
        self._make_room(0)
        return found

    def _check_size(self, num_files: int, num_bytes: int) -> None:
        """Raises SourceError."""
        if num_files > MAX_FILES or num_bytes > self._max_bytes:
            most = f"{MAX_FILES} files and {size(self._max_bytes)} (--lora-download-bytes) are the most"
            raise SourceError(f"it has {num_files} files of {size(num_bytes)}: {most}")

    def _download(
        self, store: Any, files: Sequence[RemoteFile], given: str, staging: Path, total: int
    ) -> None:
        done = 0
        with Progress("downloading", "downloaded", shown(given), total) as progress:

            def count(more: int) -> None:
                nonlocal done
                done += more
                self._check_size(len(files), done)
                progress.set(done)

            for number, file in enumerate(files):
                target = staging / (f".archive-{number}" if file.unpack else file.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                before = done
                for left in reversed(range(TRIES)):
                    try:
                        store.get(file, target, count)
                        break
                    except SourceError as error:
                        if not (error.passing and left):
                            raise
                    done = before
                    time.sleep(RETRY_S * (TRIES - left))
                got = target.stat().st_size
                if file.size not in (None, got):
                    raise SourceError(
                        f"{file.name} has {got} bytes, not the {file.size} of its source", passing=True
                    )
                if file.unpack:
                    done += unpack(target, staging, self._max_bytes - done)
                    target.unlink()

    def _adapter_folder(self, staging: Path) -> Path:
        """The one folder below that holds an adapter, with nothing else in it. Raises SourceError."""
        every = [path for path in staging.rglob("*") if path.is_symlink() or not path.is_dir()]
        if any(path.is_symlink() or not path.is_file() for path in every):
            raise SourceError("it has a link, or what is no plain file")
        self._check_size(len(every), sum(path.stat().st_size for path in every))
        folders = {path.parent for path in every if path.name in MARKS or path.suffix == ".nemo"}
        folders = folders or {path.parent for path in every if path.suffix in SINGLE}
        if len(folders) != 1:
            found = ", ".join(sorted(str(one.relative_to(staging)) for one in folders)[:4])
            raise SourceError(
                f"it has several adapters: {found}" if folders else NOTHING, missing=not folders
            )
        [folder] = folders
        for path in list(folder.iterdir()):
            if path.is_dir():
                shutil.rmtree(path)
            elif not (is_read(path.name) or path.suffix in SINGLE):
                path.unlink()
        return folder

    def _keep(self, folder: Path) -> str:
        """Move an adapter's files to the folder of their content, which is complete from then on."""
        digest = hashlib.sha256()
        for file in sorted(folder.iterdir()):
            digest.update(f"{sha256_of(file)}  {file.name}\n".encode())
        target = self._folder / digest.hexdigest()
        with suppress(OSError):  # it is there
            folder.rename(target)
        return digest.hexdigest()

    def _held(self, given: str, record: dict[str, Any]) -> Located | None:
        digest = str(record.get("digest", ""))
        folder = self._folder / digest
        try:
            held = hold(folder) if digest else -1
        except OSError:
            return None
        if held < 0:
            return None
        os.utime(folder)
        files = list(folder.iterdir())
        single = [one for one in files if one.suffix in SINGLE] if len(files) == 1 else []
        return Located(single[0] if single else folder, f"sha256:{digest}", shown(given), held)

    def _make_room(self, needed: int) -> None:
        """Delete the least recently used until `needed` more bytes fit. Raises SourceError."""
        for left in self._folder.glob(f"{PART}*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    remove_unless_held(left)
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
            raise SourceError(
                f"{size(needed)} do not fit: the adapters in use take the {size(self._max_bytes)} of "
                "--lora-download-bytes: unload some, or raise it"
            )

    def _store(self, scheme: str, by_request: bool) -> Any:
        """Raises ImportError."""
        if scheme == "oci":
            from manylora.adapters.remote.registry import Registry

            return Registry()
        from manylora.adapters.remote.file_store import FileStore

        return FileStore(scheme, self.allows if by_request else lambda url: True)

    def _own(self, scheme: str) -> Callable[[str, Path], None] | None:
        found = [one for one in entry_points(group=OWN) if one.name == scheme.lower()]
        return found[0].load() if found else None


def _plain(error: Exception, given: str) -> str:
    """The text of an error without the credentials of a source."""
    text, parts = str(error), urlsplit(given)
    for secret in (given, parts.query, parts.netloc.rpartition("@")[0]):
        text = text.replace(secret, "…") if secret else text
    return printable(text)
