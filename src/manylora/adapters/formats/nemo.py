"""NeMo adapters: a .nemo archive, which is a tar of model_weights.ckpt and model_config.yaml, with one fused
module.

The archive is read in memory; nothing is extracted. linear_in and linear_out are A and B of attn_qkv, without
scaling.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.adapters.formats import one_line
from manylora.adapters.formats.peft.names import ModuleTensors
from manylora.adapters.formats.peft.rows import RowPlan
from manylora.adapters.formats.peft.settings import PeftConfig
from manylora.adapters.formats.pickled import read_torch
from manylora.adapters.formats.read_options import DEFAULT, ReadOptions
from manylora.adapters.formats.safe_files import OpenFile, file_kind, list_files
from manylora.adapters.formats.tensor_files import RawTensor
from manylora.adapters.modules import LoraModuleId
from manylora.adapters.tensors import AdapterRow
from manylora.errors import AdapterInvalidError

WEIGHTS = "model_weights.ckpt"
CONFIG = "model_config.yaml"
MODULE = "self_attention.adapter_layer.lora_kqv_adapter"
LIMITS = {WEIGHTS: 2**31, CONFIG: 2**20}  # bytes
MAX_MEMBERS = 256
MAX_HEADER, MAX_HEADERS = 2**13, 2**18  # bytes of one, and of all
TAIL = 2**17  # bytes at the end of a zip archive, where its directory is told
LAYER = re.compile(r"\.layers\.(\d{1,5})\.")
SIDES = {".linear_in.weight": "A", ".linear_out.weight": "B"}


def find_nemo(path: Path) -> Path:
    """The archive that `path` is, or the one in the directory `path`. Raises AdapterInvalidError."""
    name = path.name
    if path.is_file():
        if path.suffix != ".nemo" and file_kind(path) != "nemo":
            raise AdapterInvalidError(f"{name} is not a .nemo file")
        return path
    if not path.is_dir():
        reason = "is neither a file nor a directory" if path.exists() else "does not exist"
        raise AdapterInvalidError(f"{name} {reason}")
    found = list_files(path, ".nemo")
    if not found:
        raise AdapterInvalidError(f"No .nemo files found in directory {name}")
    if len(found) > 1:
        raise AdapterInvalidError(f"{len(found)} .nemo files found in directory {name}: name one of them")
    return found[0]


def read_nemo(path: Path, options: ReadOptions = DEFAULT) -> list[AdapterRow]:
    """Rows of attn_qkv in float32, by layer; path: the archive. Raises AdapterInvalidError."""
    modules: dict[tuple[int, int], ModuleTensors] = {}
    for key, tensor in nemo_tensors(path, options.bounds).items():
        layer, side = nemo_key(key)
        pair = modules.setdefault((layer, LoraModuleId.ATTN_QKV), ModuleTensors(f"attn_qkv of layer {layer}"))
        if side in pair.keys:
            raise AdapterInvalidError(f"{key} means a matrix of layer {layer} that another key means too")
        pair.keys[side], pair.tensors[side] = key, tensor
    if not modules:
        raise AdapterInvalidError(f"{path.name} holds no LoRA matrices")
    for (layer, _), pair in modules.items():
        if len(pair.keys) < 2:
            side, other = ("in", "A") if "B" in pair.keys else ("out", "B")
            raise AdapterInvalidError(
                f"Layer {layer} is missing required '{side}' matrix (lora_{other} equivalent) for attn_qkv "
                f"in LoRA weights from file {path.name}. LoRA adapters must contain both 'in' and 'out' "
                "matrices for all layers. Please check if the LoRA checkpoint is complete or was corrupted "
                "during loading."
            )
    options = replace(options, digest=False, bfloat16=False)
    return RowPlan(modules, PeftConfig(1.0, folded=True), options).read(None)


def nemo_tensors(path: Path, bounds: Bounds = ANY_MODEL) -> dict[str, RawTensor]:
    """Key to tensor of the archive's checkpoint. Raises AdapterInvalidError."""
    data = _member(path, WEIGHTS, bounds)
    if data is None:
        raise AdapterInvalidError("Both model_weights paths not found in the tar archive.")
    return read_torch(data, WEIGHTS, bounds)


def nemo_key(key: str) -> tuple[int, str]:
    """The layer, and A or B. Raises AdapterInvalidError for any other key, so that nothing is dropped
    silently."""
    layer = LAYER.search(key)
    side = next((side for end, side in SIDES.items() if key.endswith(end)), None)
    if MODULE not in key or layer is None or side is None:
        raise AdapterInvalidError(f"unsupported key {key[:200]} from Nemo LoRA weights")
    return int(layer[1]), side


def nemo_num_layers(path: Path) -> int:
    """num_layers of model_config.yaml. Only top-level lines `name: value` are considered.

    Raises AdapterInvalidError.
    """
    text = (_member(path, CONFIG, ANY_MODEL) or b"").decode(errors="replace")
    found = re.findall(r"^num_layers:[ \t]*(\d{1,6})[ \t]*(?:#.*)?\r?$", text, re.MULTILINE)
    if len(found) != 1:
        raise AdapterInvalidError(f"{CONFIG} must give num_layers once")
    return int(found[0])


class _Headers(io.FileIO):
    """The headers of an archive, with a limit for their size: a member's name and metadata may claim any."""

    left = MAX_HEADERS

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= min(MAX_HEADER, self.left):
            raise ValueError("a header in it is longer than that of an adapter can be")
        self.left -= size
        return super().read(size) or b""


def _member(path: Path, wanted: str, bounds: Bounds) -> bytes | None:
    """The content of model_weights.ckpt or model_config.yaml; None: it is not there. Other members are
    ignored, except those that no NeMo archive has, which are refused."""
    found: tarfile.TarInfo | None = None
    try:
        file = OpenFile(path, bounds)
        with _Headers(os.dup(file.descriptor)) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            names: set[str] = set()
            for number, member in enumerate(archive):
                if number == MAX_MEMBERS:
                    raise ValueError(f"it has more than {MAX_MEMBERS} members")
                shown, name = member.name[:80], member.name.removeprefix("./")
                if not (member.isfile() or member.isdir()) or member.issparse():
                    raise ValueError(f"its member {shown} is neither a plain file nor a directory")
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise ValueError(f"its member {shown} points outside the archive")
                if not 0 <= member.size <= file.size:
                    told = f"{member.size} bytes, the archive has {file.size}"
                    raise ValueError(f"its member {shown} claims {told}")
                if name not in LIMITS or not member.isfile():
                    continue
                if name in names:
                    raise ValueError(f"it holds {name} twice")
                most = min(LIMITS[name], bounds.checkpoint_bytes)
                if member.size > most:
                    raise ValueError(f"{name} has {member.size} bytes, at most {most} are read")
                names.add(name)
                found = member if name == wanted else found
        if found is None:
            return None
        start, size = found.offset_data, found.size
        if start + size > file.size:
            raise ValueError(f"{wanted} is cut short")
        tail = min(size, TAIL)
        if wanted == WEIGHTS and not zipfile.is_zipfile(io.BytesIO(file.read(start + size - tail, tail))):
            raise ValueError(f"{wanted} is not the zip archive that torch.save writes, or is cut short")
        return file.read(start, size)
    except Exception as error:  # tarfile raises whatever a header makes it raise
        if isinstance(error, AdapterInvalidError):
            raise
        raise AdapterInvalidError(
            f"{path.name} is not a readable .nemo archive: {one_line(error)}"
        ) from error
