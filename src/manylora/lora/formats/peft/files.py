"""The tensors of a PEFT directory, whatever kind of adapter it holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from manylora.errors import AdapterInvalidError
from manylora.lora.formats import one_line
from manylora.lora.formats.peft.names import VISION
from manylora.lora.formats.peft.settings import CONFIG
from manylora.lora.formats.pickled import read_pickled
from manylora.lora.formats.read_options import DEFAULT, ReadOptions
from manylora.lora.formats.safe_files import is_plain
from manylora.lora.formats.tensor_files import RawTensor, read_safetensors

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
INDEX = f"{WEIGHTS}.index.json"
# PEFT's own name of an adapter, which is in the names of a model's tensors and not in those of its files.
OWN_NAME = re.compile(r"(?:\.modules_to_save)?\.default(?=(?:\.weight|\.bias)?$)")

# Of a module that is saved whole: with bias "all" PEFT also saves its own copy and the base's, and passes
# over both when it loads the adapter.
COPY = re.compile(r"\.(?:modules_to_save|original_module)(?=\.(?:weight|bias)$)")


def has_peft(folder: Path) -> bool:
    return is_plain(folder / CONFIG)


def weights_file(place: Path) -> Path:
    """place: a folder, or one file that is an adapter of its own."""
    return place if is_plain(place) else place / WEIGHTS


def peft_tensors(folder: Path, options: ReadOptions = DEFAULT) -> dict[str, RawTensor]:
    """Key to tensor, as stored; those that `options` leaves out are not there. Raises AdapterInvalidError."""
    tensors = _without_own_name(_all_tensors(folder, options))
    return {key: t for key, t in tensors.items() if not (options.text_only and VISION.search(key))}


def _without_own_name(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """As PEFT would have saved them, of a file that was written from the model's tensors as they were."""
    found: dict[str, RawTensor] = {}
    for key, tensor in tensors.items():
        if COPY.search(key) and COPY.sub("", key) in tensors:
            continue
        name = OWN_NAME.sub("", key)
        if name in found or (name != key and name in tensors):
            raise AdapterInvalidError(f"{key} and {name} mean the same tensor")
        found[name] = tensor
    return found


def _all_tensors(folder: Path, options: ReadOptions) -> dict[str, RawTensor]:
    path, pickled, bounds = weights_file(folder), folder / PICKLED, options.bounds
    if is_plain(path):
        return read_safetensors(path, bounds)
    if is_plain(folder / INDEX) and not is_plain(pickled):
        raise AdapterInvalidError(
            f"{INDEX}: an adapter in several files is not read, by PEFT neither: save their tensors in one "
            f"{WEIGHTS} (safetensors.torch.load_file of each, and save_file)"
        )
    if not is_plain(pickled):
        raise AdapterInvalidError(f"{WEIGHTS} is missing")
    if not options.allow_bin:
        raise AdapterInvalidError(
            f"{WEIGHTS} is missing, and {PICKLED} is a pickle, which servers never read: convert the adapter "
            "with manylora convert -i ADAPTER -o CONVERTED"
        )
    try:
        return read_pickled(pickled, bounds)
    except OSError as error:
        raise AdapterInvalidError(f"{PICKLED} is not readable: {one_line(error)}") from error
