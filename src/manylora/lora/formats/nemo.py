"""NeMo adapters: a .nemo archive, which is a tar of model_weights.ckpt and model_config.yaml, with one fused
module.

The archive is read in memory; nothing is extracted. linear_in and linear_out are A and B of attn_qkv, without
scaling.
"""

from __future__ import annotations

import io
import math
import os
import re
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import RowFormat
from manylora.lora.bounds import ANY_MODEL, Bounds
from manylora.lora.formats import one_line
from manylora.lora.formats.pickled import read_torch
from manylora.lora.formats.read_options import DEFAULT, ReadOptions
from manylora.lora.formats.safe_files import OpenFile, list_files
from manylora.lora.formats.tensor_files import RawTensor, check_type, decode
from manylora.lora.modules import LoraModuleId
from manylora.lora.tensors import AdapterRow, check_dims

WEIGHTS = "model_weights.ckpt"
CONFIG = "model_config.yaml"
MODULE = "self_attention.adapter_layer.lora_kqv_adapter"
LIMITS = {WEIGHTS: 2**31, CONFIG: 2**20}  # bytes
MAX_MEMBERS = 256
MAX_HEADER, MAX_HEADERS = 2**13, 2**18  # bytes of one, and of all
TAIL = 2**17  # bytes at the end of a zip archive, where its directory is told
LAYER = re.compile(r"\.layers\.(\d{1,5})\.")
SIDES = {".linear_in.weight": "A", ".linear_out.weight": "B"}


def is_tar(path: Path, bounds: Bounds = ANY_MODEL) -> bool:
    """Whether the file starts like a tar archive."""
    try:
        return OpenFile(path, bounds).read(257, 5) == b"ustar"
    except (AdapterInvalidError, OSError):
        return False


def find_nemo(path: Path) -> Path:
    """The archive that `path` is, or the one in the directory `path`. Raises AdapterInvalidError."""
    name = path.name
    if path.is_file():
        if path.suffix != ".nemo" and not is_tar(path):
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
    pairs: dict[int, dict[str, tuple[str, RawTensor]]] = {}
    for key, tensor in nemo_tensors(path, options.bounds).items():
        layer, side = nemo_key(key)
        pair = pairs.setdefault(layer, {})
        if side in pair:
            raise AdapterInvalidError(f"{key} means a matrix of layer {layer} that another key means too")
        pair[side] = key, tensor
    if not pairs:
        raise AdapterInvalidError(f"{path.name} holds no LoRA matrices")
    options.bounds.check_rows(len(pairs))
    options.bounds.check_elements(
        sum(_check_shapes(layer, pair, path.name, options) for layer, pair in pairs.items())
    )
    return [_row(layer, pair) for layer, pair in sorted(pairs.items())]


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
                _check_member(member, file.size)
                name = member.name.removeprefix("./")
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


def _check_member(member: tarfile.TarInfo, archive_size: int) -> None:
    name = member.name[:80]
    if not (member.isfile() or member.isdir()) or member.issparse():
        raise ValueError(f"its member {name} is neither a plain file nor a directory")
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise ValueError(f"its member {name} points outside the archive")
    if not 0 <= member.size <= archive_size:
        raise ValueError(f"its member {name} claims {member.size} bytes, the archive has {archive_size}")


def _check_shapes(
    layer: int, pair: Mapping[str, tuple[str, RawTensor]], file: str, options: ReadOptions
) -> int:
    """The number of elements of a row. Raises AdapterInvalidError if the row must not be read."""
    if len(pair) < 2:
        gone = "'in' matrix (lora_A equivalent)" if "B" in pair else "'out' matrix (lora_B equivalent)"
        raise AdapterInvalidError(
            f"Layer {layer} is missing required {gone} for attn_qkv in LoRA weights from file {file}. LoRA "
            "adapters must contain both 'in' and 'out' matrices for all layers. Please check if the LoRA "
            "checkpoint is complete or was corrupted during loading."
        )
    for key, tensor in pair.values():
        check_type(key, tensor)
    a, b = pair["A"][1].shape, pair["B"][1].shape
    check_dims(f"attn_qkv of layer {layer}", a, b, options.module(LoraModuleId.ATTN_QKV, layer))
    options.bounds.check_rank(a[0])
    elements = math.prod(a) + math.prod(b)
    options.check_row(LoraModuleId.ATTN_QKV, layer, RowFormat(a[0]), elements)
    return elements


def _row(layer: int, pair: Mapping[str, tuple[str, RawTensor]]) -> AdapterRow:
    a, b = (decode(*pair[side]) for side in "AB")
    payload = np.concatenate((a.ravel(), b.ravel()))
    return AdapterRow(LoraModuleId.ATTN_QKV, layer, RowFormat(a.shape[0]), payload)
