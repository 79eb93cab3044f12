"""Models and adapters by their id on the Hugging Face hub, which huggingface_hub fetches. Only files that we
read, never pickles or code, and only for code that starts a process, never for a request to a server.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from manylora.checkpoints.gguf.config import gguf_folder, is_gguf
from manylora.errors import ConfigError, printable
from manylora.system.progress import Progress, size

logger = logging.getLogger("manylora")

ID = re.compile(r"(\w[\w.-]{0,95}/\w[\w.-]{0,95})(?:@([\w./-]{1,200}))?", re.ASCII)
HUB = "hf://"  # before an id that is not to be taken for a path
COMMIT = re.compile(r"[0-9a-f]{40}\b")
MODEL_FILES = ("*.json", "*.jinja", "*.safetensors")
ADAPTER_FILES = (
    "*.json", "*.jinja", "adapter_model*.safetensors", "adapters.safetensors", "*[lL]o[rR][aA]*.gguf",
    "*.npy",
)  # fmt: skip
# Subfolders hold other formats, except those of sentence-transformers, such as 1_Pooling. consolidated.*
# holds the same weights again.
NOT_READ = ("[!0-9]*/*", "[0-9][!_]*/*", "*/*/*", "consolidated*")
LOOK_S = 0.5  # between two checks of the download's progress


def is_hub_id(given: str | Path) -> bool:
    """Whether it has the form of a hub id, and is no path here, nor of a GGUF file that a folder lacks."""
    path = Path(given)
    is_path = path.exists() or (path.suffix == ".gguf" and path.parent.is_dir())
    return ID.fullmatch(str(given)) is not None and not is_path


def hub_name(given: str | Path) -> str:
    """The id without its revision."""
    return str(given).partition("@")[0]


def local_model(given: str | Path, revision: str | None = None, cache: Path | None = None) -> Path:
    """A folder as it is, or of a GGUF file, or of the files of a hub id, which are downloaded unless they are
    in the cache. revision: branch, tag or commit of an id. cache: folder. Raises ConfigError.
    """
    return model_folder(_local(given, revision, cache, MODEL_FILES))


def model_folder(path: Path) -> Path:
    """The folder that stands for a GGUF file. Any other path is returned as it is. Raises ConfigError."""
    return gguf_folder(path) if is_gguf(path) else path


def local_adapter(
    given: str | Path, revision: str | None = None, cache: Path | None = None, most: int | None = None
) -> Path:
    """As `local_model`, for the folder or file of an adapter. most: bytes to download."""
    return _local(given, revision, cache, ADAPTER_FILES, most)


def hub_cache(given: Path | None) -> Path:
    """The folder of downloads. given: the one to use; None: that of HF_HOME."""
    from huggingface_hub import constants

    return Path(given or constants.HF_HUB_CACHE).expanduser()


def model_revision(folder: Path) -> str | None:
    """The commit of a folder that the hub's cache or `hf download --local-dir` made; None: unknown."""
    if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name):
        return folder.name
    try:
        told = (folder / ".cache" / "huggingface" / "download" / "config.json.metadata").read_text()
    except (OSError, ValueError):
        return None
    found = COMMIT.match(told)
    return found[0] if found else None


def _local(
    given: str | Path,
    revision: str | None,
    cache: Path | None,
    files: tuple[str, ...],
    most: int | None = None,
) -> Path:
    path, name = Path(given).expanduser(), str(given).removeprefix(HUB)
    if name != str(given) and not ID.fullmatch(name):
        raise ConfigError(f"{given} is no id of the hub: give {HUB}org/name, with @revision if need be")
    if name == str(given) and (path.exists() or not is_hub_id(given)):
        if revision is not None:
            raise ConfigError(f"revision {revision!r} is for an id of the hub, org/name: {given} is a path")
        return path
    name, _, own = name.partition("@")
    if own and revision not in (None, own):
        raise ConfigError(f"{given} names the revision {own}, and revision is {revision}: give one of them")
    revision = own or revision
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # our own is also shown in logs
    place = hub_cache(cache)
    patterns = {"allow_patterns": list(files), "ignore_patterns": list(NOT_READ)}
    get: Callable[..., Any] = partial(snapshot_download, name, revision=revision, cache_dir=place, **patterns)
    shown = name if revision is None else f"{name}@{revision}"
    try:
        todo = sum(one.file_size for one in get(dry_run=True) if one.will_download)
        if most is not None and todo > most:
            raise ConfigError(f"{shown} has {size(todo)}, at most {size(most)} are downloaded")
        return Path(_download(get, shown, place, todo) if todo else get())
    except DryRunError as error:  # no network or no access: the cache may be enough
        cause = error.__cause__ or error
        try:
            folder = get(local_files_only=True)
        except LocalEntryNotFoundError:
            raise ConfigError(_problem(shown, place, cause)) from error
        logger.warning("%s: %s; the files in the cache are used", shown, _reason(cause))
        return Path(folder)
    except Exception as error:  # including those of its libraries
        raise ConfigError(_problem(shown, place, error)) from error


def _download(get: Callable[[], str], shown: str, place: Path, todo: int) -> str:
    """Raises ConfigError if there is not enough disk space, and whatever `get` raises."""
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free
    if free < todo:
        raise ConfigError(
            f"{shown} needs {size(todo)}, and {place} has {size(free)} left: free some, or set HF_HOME to a "
            "folder on a larger disk"
        )
    folder = place / f"models--{hub_name(shown).replace('/', '--')}" / "blobs"
    before, future = _stored(folder), Future[str]()

    def run() -> None:
        try:
            future.set_result(get())
        except BaseException as error:
            future.set_exception(error)

    # On a thread because huggingface_hub joins its own: otherwise Ctrl-C would wait for whole files.
    threading.Thread(target=run, name="manylora-download", daemon=True).start()
    with Progress("downloading", "downloaded", shown, todo) as progress:
        while not wait([future], LOOK_S).done:
            progress.set(_stored(folder) - before)
        return future.result()


def _stored(folder: Path) -> int:
    """Bytes of the files in a folder, complete or not."""
    count = 0
    with suppress(OSError):  # not created yet, or just renamed
        for one in folder.iterdir():
            count += one.stat().st_blocks * 512
    return count


def _problem(shown: str, place: Path, error: BaseException) -> str:
    """One line that says why it cannot be fetched, and what to do."""
    from huggingface_hub import constants, errors

    hub, (name, _, revision) = constants.ENDPOINT, shown.partition("@")
    match error:
        case ConfigError():
            return str(error)
        case errors.GatedRepoError():
            return (
                f"{name} is gated: accept its terms on {hub}/{name}, and set HF_TOKEN to a token of yours "
                "(or: hf auth login)"
            )
        case errors.RevisionNotFoundError():
            return f"{name} has no revision {revision!r} on {hub}: give one of its branches or tags"
        case errors.RepositoryNotFoundError():
            return (
                f"there is no folder {name} here, and no {name} on {hub}; if that is private, set HF_TOKEN "
                "(or: hf auth login)"
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return (
                f"{shown}: the disk of {place} is full: free some of it, or set HF_HOME to a folder elsewhere"
            )
        case PermissionError():
            return f"{shown}: {error.filename or place} may not be written: set HF_HOME to a folder of yours"
        case errors.OfflineModeIsEnabled():
            return (
                f"there is no folder {name} here, and it is not whole in the cache {place} while "
                f"HF_HUB_OFFLINE is set: unset it, or run once with a network: hf download {name}"
            )
    return (
        f"there is no folder {name} here, and it cannot be had from {hub}: {_reason(error)}; without a "
        f"network give a folder, or fill the cache elsewhere: hf download {name}"
    )


def _reason(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0].strip()
    return printable(first or type(error).__name__)
