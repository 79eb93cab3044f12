"""NeMo adapters: a .nemo archive, a tar of model_weights.ckpt and model_config.yaml, with one fused module.

The archive is read in memory, member by member; nothing is extracted. Linear_in and linear_out are A and B
of attn_qkv as they are: NeMo has no scaling.
"""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats import one_line
from manylora.lora.formats.tensor_files import RawTensor, decode, read_torch
from manylora.lora.modules import LoraModule
from manylora.lora.tensors import AdapterRow, check_dims

__all__ = ["MODULE", "find_nemo", "is_tar", "nemo_key", "nemo_num_layers", "nemo_tensors", "read_nemo"]

WEIGHTS = "model_weights.ckpt"
CONFIG = "model_config.yaml"
MODULE = "self_attention.adapter_layer.lora_kqv_adapter"
LIMITS = {WEIGHTS: 2**31, CONFIG: 2**20}  # bytes
MAX_MEMBERS = 256
LAYER = re.compile(r"\.layers\.(\d{1,5})\.")
SIDES = {".linear_in.weight": "A", ".linear_out.weight": "B"}
ATTN_QKV = 0


def is_tar(path: Path) -> bool:
    """Whether the file has the mark of a tar archive."""
    try:
        with path.open("rb") as file:
            return file.read(262)[257:] == b"ustar"
    except OSError:
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
    found = sorted(path.glob("*.nemo"))
    if not found:
        raise AdapterInvalidError(f"No .nemo files found in directory {name}")
    if len(found) > 1:
        raise AdapterInvalidError(f"{len(found)} .nemo files found in directory {name}: name one of them")
    return found[0]


def read_nemo(path: Path, modules: Mapping[int, LoraModule] | None = None) -> list[AdapterRow]:
    """Rows of attn_qkv in float32, by layer; path: the archive; modules: the model's, whose dimensions the
    matrices must then have. Raises AdapterInvalidError."""
    module = modules.get(ATTN_QKV) if modules else None
    pairs: dict[int, dict[str, np.ndarray]] = {}
    for key, tensor in nemo_tensors(path).items():
        layer, side = nemo_key(key)
        pair = pairs.setdefault(layer, {})
        if side in pair:
            raise AdapterInvalidError(f"{key} means a matrix of layer {layer} that another key means too")
        pair[side] = decode(key, tensor)
    if not pairs:
        raise AdapterInvalidError(f"{path.name} holds no LoRA matrices")
    return [_row(layer, pair, path.name, module) for layer, pair in sorted(pairs.items())]


def nemo_tensors(path: Path) -> dict[str, RawTensor]:
    """Key to tensor of the archive's checkpoint. Raises AdapterInvalidError."""
    members = _members(path)
    if WEIGHTS not in members:
        raise AdapterInvalidError("Both model_weights paths not found in the tar archive.")
    return read_torch(members[WEIGHTS], WEIGHTS)


def nemo_key(key: str) -> tuple[int, str]:
    """Layer, and A or B. Raises AdapterInvalidError for anything else: it would be lost."""
    layer = LAYER.search(key)
    side = next((side for end, side in SIDES.items() if key.endswith(end)), None)
    if MODULE not in key or layer is None or side is None:
        raise AdapterInvalidError(f"unsupported key {key[:200]} from Nemo LoRA weights")
    return int(layer[1]), side


def nemo_num_layers(path: Path) -> int:
    """num_layers of model_config.yaml, of which only top-level `name: value` lines are looked at.

    Raises AdapterInvalidError.
    """
    text = _members(path).get(CONFIG, b"").decode(errors="replace")
    found = re.findall(r"^num_layers:[ \t]*(\d{1,6})[ \t]*(?:#.*)?\r?$", text, re.MULTILINE)
    if len(found) != 1:
        raise AdapterInvalidError(f"{CONFIG} must give num_layers once")
    return int(found[0])


def _members(path: Path) -> dict[str, bytes]:
    """The two members we know. Others are passed over, except those that an archive of NeMo never has."""
    found: dict[str, bytes] = {}
    try:
        size = path.stat().st_size
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for number, member in enumerate(archive):
                if number == MAX_MEMBERS:
                    raise ValueError(f"it has more than {MAX_MEMBERS} members")
                _check_member(member, size)
                name = member.name.removeprefix("./")
                if name not in LIMITS or not member.isfile():
                    continue
                if name in found:
                    raise ValueError(f"it holds {name} twice")
                if member.size > LIMITS[name]:
                    raise ValueError(f"{name} has {member.size} bytes, at most {LIMITS[name]} are read")
                stream = archive.extractfile(member)
                assert stream is not None
                if name == WEIGHTS and not zipfile.is_zipfile(stream):  # looks at the end only
                    raise ValueError(f"{name} is not the zip archive that torch.save writes, or is cut short")
                stream.seek(0)
                found[name] = stream.read()
                if len(found[name]) != member.size:
                    raise ValueError(f"{name} is cut short")
    except Exception as error:  # tarfile raises whatever a header makes it raise
        raise AdapterInvalidError(
            f"{path.name} is not a readable .nemo archive: {one_line(error)}"
        ) from error
    return found


def _check_member(member: tarfile.TarInfo, archive_size: int) -> None:
    name = member.name[:80]
    if not (member.isfile() or member.isdir()) or member.issparse():
        raise ValueError(f"its member {name} is neither a plain file nor a directory")
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise ValueError(f"its member {name} points outside the archive")
    if not 0 <= member.size <= archive_size:
        raise ValueError(f"its member {name} claims {member.size} bytes, the archive has {archive_size}")


def _row(layer: int, pair: dict[str, np.ndarray], file: str, module: LoraModule | None) -> AdapterRow:
    if len(pair) < 2:
        gone = "'in' matrix (lora_A equivalent)" if "B" in pair else "'out' matrix (lora_B equivalent)"
        raise AdapterInvalidError(
            f"Layer {layer} is missing required {gone} for attn_qkv in LoRA weights from file {file}. LoRA "
            "adapters must contain both 'in' and 'out' matrices for all layers. Please check if the LoRA "
            "checkpoint is complete or was corrupted during loading."
        )
    a, b = pair["A"], pair["B"]
    check_dims(f"attn_qkv of layer {layer}", a, b, module)
    return AdapterRow(ATTN_QKV, layer, a.shape[0], False, np.concatenate((a.ravel(), b.ravel())))
