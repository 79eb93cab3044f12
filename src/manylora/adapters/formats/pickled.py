"""Checkpoints of torch.save: only named tensors are read, and nothing that their pickle names is run.

Such a checkpoint is a pickle in a zip. Before torch sees it, its pickle may name nothing but tensors and
their storage, and its zip may not be compressed, so that a file takes no more memory than its own size.

`read_pickled` is for tools that convert; no server reads such files. It reads in a process of its own,
`python -m` of this module, which may take so much memory and processor time as its file's size explains.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.adapters.formats import one_line, tensor_files
from manylora.adapters.formats.safe_files import OpenFile
from manylora.adapters.formats.tensor_files import RawTensor
from manylora.errors import AdapterInvalidError
from manylora.system.folders import temporary_folder

# All that the pickle of a state dict needs.
ALLOWED_GLOBALS = re.compile(
    r"torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)|collections OrderedDict"
)
NEWER_TENSOR = "torch._utils _rebuild_tensor_v3"  # by which types without a storage class of their own go
BY_NAME = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX", "OBJ")  # other ways to a class
MAX_OPCODES = 500_000  # about 16 000 tensors; reading them takes half a second
MAX_ENTRIES = 50_000
MEMORY = 2**28  # bytes beside torch's, and beside the file and a copy of its tensors
CPU_S, BYTES_PER_S = 10, 2**25  # seconds of processor time for any file, and more for a large one
OPCODES = 64  # of a tensor's pickle; there are about 30
INPUT = Path("/proc/self/fd/0")


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


def read_torch(source: bytes | Path, name: str, bounds: Bounds = ANY_MODEL) -> dict[str, RawTensor]:
    """The tensors of a state dict written by torch.save. name: of the file, for errors. source: its bytes, or
    its path, which is then memory-mapped.

    Raises AdapterInvalidError. Nothing that the pickle names is run.
    """
    try:
        import torch

        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            _check_archive(file, size, bounds)
            file.seek(0)
            mapped = isinstance(source, Path)
            found = torch.load(
                str(source) if mapped else file, map_location="cpu", weights_only=True, mmap=mapped
            )
        if not isinstance(found, dict):
            raise ValueError("it holds something else than named tensors")
        # Megatron writes None for the extra state that a layer does not have.
        tensors = {str(key): value for key, value in found.items() if value is not None}
        if not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise ValueError("it holds something else than named tensors")
        # Two tensors may share a storage, and one may repeat it: neither may grow what is read.
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > size:
            raise ValueError("its tensors are larger than the file")
        return {key: _raw(tensor) for key, tensor in tensors.items()}
    except Exception as error:  # zipfile, pickletools and torch raise whatever the bytes make them raise
        # torch's own text is advice to load the file without this protection.
        refused = isinstance(error, pickle.UnpicklingError)
        why = "its pickle is not that of named tensors" if refused else one_line(error)
        raise AdapterInvalidError(f"{name} is not a readable torch checkpoint: {why}") from error


def _check_archive(file: IO[bytes], size: int, bounds: Bounds) -> None:
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not the zip archive that torch.save writes")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        most = min(MAX_ENTRIES, 2 * bounds.tensors)
        if len(entries) > most:
            raise ValueError(f"it has more than {most} entries")
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            raise ValueError("its entries are compressed")
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("its entries are larger than the file")
        pickles = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise ValueError("it must hold data.pkl once")
        data, most = archive.read(pickles[0]), min(MAX_OPCODES, OPCODES * bounds.tensors)
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number == most:
            raise ValueError("its pickle is longer than an adapter's can be")
        if argument == NEWER_TENSOR:
            raise ValueError("it holds 8-bit floats or another type that is read from safetensors only")
        named = opcode.name == "GLOBAL" and not ALLOWED_GLOBALS.fullmatch(str(argument))
        if named or opcode.name in BY_NAME:
            what = str(argument or opcode.name).replace(" ", ".")[:80]
            raise ValueError(f"it names {what}, which is not a tensor; code in a checkpoint is never run")


def _raw(tensor: Any) -> RawTensor:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    kinds = {tensor_files.TORCH_NAMES[kind]: kind for kind in ("F64", "F32", "F16", "BF16")}
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or name not in kinds:
        return RawTensor(name, tuple(tensor.shape), b"")
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return RawTensor(kinds[name], tuple(tensor.shape), data)


def read_pickled(path: Path, bounds: Bounds) -> dict[str, RawTensor]:
    """The tensors of a state dict by name. Their values are in an unlinked temporary file until they are
    read. Raises AdapterInvalidError, OSError."""
    return dict(_read(path, path.stat().st_mtime_ns, bounds))


@lru_cache(1)  # tools ask for its type, and then for its rows
def _read(path: Path, _changed: int, bounds: Bounds) -> dict[str, RawTensor]:
    file = OpenFile(path, bounds)
    if file.size > bounds.checkpoint_bytes:
        raise AdapterInvalidError(
            f"{path.name} has {file.size} bytes, at most {bounds.checkpoint_bytes} are read"
        )
    with temporary_folder("pickled") as folder:
        read = folder / path.with_suffix(".safetensors").name
        command = [sys.executable, "-m", __name__, str(read), path.name, str(bounds.tensors)]
        done = subprocess.run(command, stdin=file.descriptor, capture_output=True, check=False)
        if done.returncode == 0:
            return tensor_files.read_safetensors(read, bounds)
    said = done.stdout.decode(errors="replace").strip()
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        most = _seconds(file.size)
        why = f"it takes more than {most} s of processor time, or more memory than there is"
    else:
        why = f"the process that reads it ended with status {done.returncode}"
    raise AdapterInvalidError(said or f"{path.name} is not readable: {why}")


def _seconds(size: int) -> int:
    return CPU_S + size // BYTES_PER_S


def limit_resources(size: int) -> None:
    """Limit what this process may use in addition to what it has already used. size: of the file."""
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        resource.RLIMIT_AS: mapped + 2 * size + MEMORY,
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + _seconds(size),
        resource.RLIMIT_FSIZE: size + MEMORY,
        resource.RLIMIT_CORE: 0,
    }
    for name, most in limits.items():
        _, hard = resource.getrlimit(name)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (least, least))


def main(target: str, name: str, tensors: str) -> int:
    """Read a checkpoint from standard input and write its tensors to `target`, or print the error."""
    import torch

    torch.set_num_threads(1)
    limit_resources(os.fstat(0).st_size)
    try:
        found = read_torch(INPUT, name, Bounds(tensors=int(tensors)))
        for key, tensor in found.items():
            tensor_files.check_type(key, tensor)
        tensor_files.write_safetensors(Path(target), found)
    except AdapterInvalidError as error:
        print(error)
        return 1
    except OSError as error:
        print(f"{name} cannot be converted: {error.strerror}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
