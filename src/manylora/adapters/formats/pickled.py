"""Checkpoints of torch.save: only named tensors are read, and nothing that their pickle names is run.

Such a checkpoint is a pickle in a zip. Before torch sees it, its pickle may name nothing but tensors and
their storage, and its zip may not be compressed, so that a file takes no more memory than its own size.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.adapters.formats import one_line, tensor_files
from manylora.adapters.formats.tensor_files import RawTensor
from manylora.errors import AdapterInvalidError

# All that the pickle of a state dict needs.
ALLOWED_GLOBALS = re.compile(
    r"torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)|collections OrderedDict"
)
NEWER_TENSOR = "torch._utils _rebuild_tensor_v3"  # by which types without a storage class of their own go
BY_NAME = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX", "OBJ")  # other ways to a class
MAX_OPCODES = 500_000  # about 16 000 tensors; reading them takes half a second
MAX_ENTRIES = 50_000
OPCODES = 64  # of a tensor's pickle; there are about 30
MAX_DEPTH = 2  # of tuples in tuples: a tensor's shape among what it is made from


def write_torch(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Write a state dict with torch.save. Raises OSError."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    state = {}
    for key, tensor in tensors.items():
        kind = getattr(torch, tensor_files.TORCH_NAMES[tensor.dtype])
        state[key] = torch.frombuffer(bytearray(tensor.data), dtype=kind).reshape(tensor.shape)
    with path.open("wb") as file:
        torch.save(state, file)


def read_torch(data: bytes, name: str, bounds: Bounds = ANY_MODEL) -> dict[str, RawTensor]:
    """The tensors of a state dict written by torch.save. name: of the file, for errors. data: its content.

    Raises AdapterInvalidError. Nothing that the pickle names is run.
    """
    try:
        import torch

        _check_archive(data, bounds)
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(found, dict):
            raise ValueError("it holds something else than named tensors")
        # Megatron writes None for the extra state that a layer does not have.
        tensors = {str(key): value for key, value in found.items() if value is not None}
        if not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise ValueError("it holds something else than named tensors")
        # Two tensors may share a storage, and one may repeat it: neither may grow what is read.
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > len(data):
            raise ValueError("its tensors are larger than the file")
        return {key: _raw(tensor) for key, tensor in tensors.items()}
    except Exception as error:  # zipfile, pickletools and torch raise whatever the bytes make them raise
        # torch's own text is advice to load the file without this protection.
        refused = isinstance(error, pickle.UnpicklingError)
        why = "its pickle is not that of named tensors" if refused else one_line(error)
        raise AdapterInvalidError(f"{name} is not a readable torch checkpoint: {why}") from error


def _check_archive(data: bytes, bounds: Bounds) -> None:
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise ValueError("it is not the zip archive that torch.save writes")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        most = min(MAX_ENTRIES, 2 * bounds.tensors)
        if len(entries) > most:
            raise ValueError(f"it has more than {most} entries")
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            raise ValueError("its entries are compressed")
        if sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("its entries are larger than the file")
        pickles = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise ValueError("it must hold data.pkl once")
        _check_pickle(archive.read(pickles[0]), min(MAX_OPCODES, OPCODES * bounds.tensors))


def _check_pickle(data: bytes, most: int) -> None:
    """most: opcodes. Torch hashes what a pickle gives as keys, with the GIL held: of a tuple in a tuple that
    takes as long as both are large together, or as deep as the stack. So tuples are used once and flat."""
    depths: list[int] = []  # of the tuples in each object on the unpickler's stack
    marks: list[int] = []  # places on that stack
    kept: dict[object, int] = {}  # depths by the number that an object is kept under
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number == most:
            raise ValueError("its pickle is longer than an adapter's can be")
        if argument == NEWER_TENSOR:
            raise ValueError("it holds 8-bit floats or another type that is read from safetensors only")
        named = opcode.name == "GLOBAL" and not ALLOWED_GLOBALS.fullmatch(str(argument))
        if named or opcode.name in BY_NAME:
            what = str(argument or opcode.name).replace(" ", ".")[:80]
            raise ValueError(f"it names {what}, which is not a tensor; code in a checkpoint is never run")
        if opcode.name == "MARK":
            marks.append(len(depths))
            continue
        start = len(depths) - len(opcode.stack_before)
        if pickletools.markobject in opcode.stack_before:  # the mark itself, and what is above it
            start = marks.pop() - opcode.stack_before.index(pickletools.markobject)
        depth = 1 + max(depths[start:], default=0) if "TUPLE" in opcode.name else 0
        if depth > MAX_DEPTH or ("GET" in opcode.name and kept.get(argument)):
            raise ValueError("its pickle has tuples in tuples, which named tensors do not have")
        if "PUT" in opcode.name:
            kept[argument] = depths[-1]
        depths[start:] = [depth] * len(opcode.stack_after)


def _raw(tensor: Any) -> RawTensor:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    kinds = {tensor_files.TORCH_NAMES[kind]: kind for kind in ("F64", "F32", "F16", "BF16")}
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or name not in kinds:
        return RawTensor(name, tuple(tensor.shape), b"")
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return RawTensor(kinds[name], tuple(tensor.shape), data)
