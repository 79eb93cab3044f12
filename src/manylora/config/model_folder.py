"""Finds the folder of a model or adapter, given as a path or an id of the Hugging Face hub, and checks
it. An error says in one line what it is and what to do.

huggingface_hub fetches only files that we read, never pickles or code, and only for code that starts a
process, never for a request to a server.
"""

from __future__ import annotations

import difflib
import errno
import json
import logging
import re
import shlex
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from manylora.checkpoints.gguf.config import gguf_folder, is_gguf, linked_files
from manylora.config.settings import read_json, readable
from manylora.errors import ConfigError, printable
from manylora.system.command_line import Progress, size

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
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SPM = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
LFS = b"version https://git-lfs"
MOST_LISTED = 5
AGAIN = "copy or download it again, whole"
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


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def check_model_folder(folder: Path, *, weights: bool = True) -> None:
    """Raises ConfigError unless there is a config.json and, with `weights`, the files of `weight_files`."""
    with readable(folder):
        if not (folder / "config.json").is_file():
            raise ConfigError(_no_model(folder))
    if weights:
        weight_files(folder)


def check_adapter_path(path: Path) -> None:
    """Raises ConfigError if the path does not exist or is a base model."""
    with readable(path):
        if not path.exists():
            raise ConfigError(_no_folder(path, "adapter's folder"))
        is_model = (path / "config.json").is_file() and not (path / "adapter_config.json").is_file()
    if is_model:
        raise ConfigError(f"{path} is a whole model, not an adapter: manylora serve {shlex.quote(str(path))}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files, or the parts of the GGUF file. Raises ConfigError if one is missing."""
    with readable(folder):
        names = indexed_files(folder) or [WEIGHTS] * (folder / WEIGHTS).is_file()
        files = [folder / name for name in names] or [folder / file.name for file in linked_files(folder)]
        if not files:
            raise ConfigError(_no_weights(folder))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            lost = f"{len(missing)} of its {len(files)} files of weights are missing"
            raise ConfigError(f"{folder} lacks {missing[0]} ({lost}): {AGAIN}")
        for path in files:
            with path.open("rb") as file:
                if file.read(len(LFS)) == LFS:
                    raise ConfigError(
                        f"{path} is a pointer of Git LFS, not the file itself: "
                        f"git -C {shlex.quote(str(folder))} lfs pull"
                    )
    return files


def check_tokenizer_folder(folder: Path) -> None:
    """Raises ConfigError unless there is a tokenizer.json."""
    if (folder / "tokenizer.json").is_file():
        return
    if not folder.is_dir():
        raise ConfigError(_no_folder(folder))
    if older := next((one for one in SPM if (folder / one).is_file()), None):
        raise ConfigError(
            f"{folder} has no tokenizer.json, only {older}: make one with {_python(folder, 'AutoTokenizer')}"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(_no_model(folder))
    raise ConfigError(
        f"{folder} has no tokenizer (no tokenizer.json): copy it from the model this one was made from, "
        "or name the folder of another (--tokenizer, tokenizer=)"
    )


def indexed_files(folder: Path) -> list[str]:
    """Names of the safetensors files in the checkpoint's index. Empty: it has none. Raises ConfigError."""
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [Path(name).name for name in names]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error}") from error


def _no_model(folder: Path) -> str:
    """Why a path without a config.json is not a model's folder."""
    if not folder.exists():
        return _no_folder(folder)
    if folder.is_file():
        return _no_folder_but_file(folder)
    adapter = read_json(folder / "adapter_config.json")
    if adapter is not None:
        return _adapter(folder, adapter)
    names = _names(folder)
    if not names:
        return f"{folder} is empty: give the folder of a Hugging Face model"
    below = (*folder.glob("snapshots/*"), *folder.glob("*"))
    inside = [one for one in below if (one / "config.json").is_file()]
    if inside:
        others = f" (or one of {len(inside) - 1} more)" if len(inside) > 1 else ""
        return f"{folder} is no model, but has one in it: give {inside[0]}{others}"
    if found := [name for name in names if name.endswith(".gguf")]:
        return _gguf(folder / found[0])
    if "params.json" in names and any(name.startswith("consolidated.") for name in names):
        return (
            f"{folder} has the weights in their maker's own layout (params.json): take the Hugging Face "
            "form, the one with a config.json"
        )
    if any(name.endswith(".engine") for name in names):
        return _engine(folder)
    listed = ", ".join(map(printable, names[:MOST_LISTED])) + (", …" if len(names) > MOST_LISTED else "")
    return (
        f"{folder} is no model, it has no config.json but {listed}: give the folder of a Hugging Face model"
    )


def _no_folder(folder: Path, what: str = "model's folder") -> str:
    if folder.is_file():
        return _no_folder_but_file(folder)
    parent = next(one for one in folder.absolute().parents if one.is_dir())
    hint, is_file = "", folder.suffix == ".gguf"
    if parent == folder.absolute().parent:
        names = [name for name in _names(parent) if not is_file or name.endswith(".gguf")]
        most, cutoff = (3, 0.4) if is_file else (1, 0.6)
        near = difflib.get_close_matches(folder.name, names, most, cutoff)
        hint = f" (did you mean {' or '.join(str(folder.parent / one) for one in near)}?)" if near else ""
    else:
        hint = f"; of its path there is only {parent}"
    if is_file:
        return f"the file {folder} does not exist{hint}"
    if folder.name == str(folder):
        hint += "; an id of the hub has its owner in front: org/name"
    if is_hub_id(folder):
        hint += f"; a model of the hub is fetched with: hf download {folder}"
    return f"the {what} {folder} does not exist{hint}"


def _no_folder_but_file(file: Path) -> str:
    if file.suffix == ".gguf":
        return _gguf(file)
    if (file.parent / "config.json").is_file() or (file.parent / "adapter_config.json").is_file():
        return f"{file} is a file, and a model is a folder: give {file.parent}"
    return f"{file} is a file: give the folder of a Hugging Face model, with config.json and {WEIGHTS}"


def _adapter(folder: Path, config: dict[str, Any]) -> str:
    base = printable(str(config.get("base_model_name_or_path") or "")) or "MODEL"
    own = folder.absolute()
    name = own.parents[1].name.rpartition("--")[2] if own.parent.name == "snapshots" else own.name
    return (
        f"{folder} is an adapter" + ("" if base == "MODEL" else f" of {base}") + ", not a model: "
        f"manylora serve {shlex.quote(base)} --lora-modules {shlex.quote(f'{name}={folder}')}, or in Python "
        f"LLM({base!r}, enable_lora=True) and LoRARequest({name!r}, 1, {str(folder)!r})"
    )


def _no_weights(folder: Path) -> str:
    names = _names(folder)
    if any(name.endswith(".engine") for name in names):
        return _engine(folder)
    if (folder / "adapter_config.json").is_file():
        return _adapter(folder, read_json(folder / "adapter_config.json") or {})
    if found := [name for name in names if name.endswith(PICKLES) and name != "training_args.bin"]:
        return (
            f"{folder} has its weights in {found[0]}, a pickle, which is not read: make safetensors of it "
            "with " + _python(folder, "AutoModelForCausalLM", "AutoTokenizer")
        )
    if found := [name for name in names if name.endswith(".gguf")]:
        return _gguf(folder / found[0])
    if found := [name for name in names if name.endswith(".safetensors")]:
        return (
            f"{folder} has {found[0]}, but neither {WEIGHTS} nor {INDEX}, which say where the weights are: "
            f"{AGAIN}"
        )
    return f"{folder} has a config.json but no weights ({WEIGHTS}): {AGAIN}"


def _gguf(file: Path) -> str:
    return f"{file} is a GGUF file: give its own path, {file}"


def _engine(folder: Path) -> str:
    return (
        f"{folder} is an engine of TensorRT-LLM, which only that can run: give the Hugging Face model it was "
        "built from"
    )


def _python(folder: Path, *classes: str) -> str:
    """The command that makes transformers save it as safetensors and tokenizer.json."""
    target = str(folder) if len(classes) == 1 else f"{folder.absolute().name}-safetensors"
    calls = (f"t.{one}.from_pretrained({str(folder)!r}).save_pretrained({target!r})" for one in classes)
    return f'python -c "import transformers as t; {"; ".join(calls)}"'


def _names(folder: Path) -> list[str]:
    try:
        return sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
    except OSError:
        return []
