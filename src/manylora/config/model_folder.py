"""Checks of a path that was given as a model. The error says in one line what it is and what to do."""

from __future__ import annotations

import difflib
import json
import shlex
from pathlib import Path
from typing import Any

from manylora.checkpoints.gguf.config import linked_files
from manylora.config.hub import is_hub_id
from manylora.config.settings import read_json, readable
from manylora.errors import ConfigError, printable

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SPM = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
LFS = b"version https://git-lfs"
MOST_LISTED = 5
AGAIN = "copy or download it again, whole"


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
