"""A checkpoint of torch.save, which is a pickle, read in a process of its own: `python -m` of this module.

For tools that convert; no server reads such files. Only tensors are read (`read_torch`), the process may take
so much memory and processor time as its file's size explains, and needs nothing but that file.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from manylora.errors import AdapterInvalidError
from manylora.lora.bounds import Bounds
from manylora.lora.formats.safe_files import OpenFile
from manylora.lora.formats.tensor_files import (
    RawTensor,
    check_type,
    read_safetensors,
    read_torch,
    write_safetensors,
)
from manylora.system.folders import temporary_folder

MEMORY = 2**28  # bytes beside torch's, and beside the file and a copy of its tensors
CPU_S, BYTES_PER_S = 10, 2**25  # seconds of processor time for any file, and more for a large one
INPUT = Path("/proc/self/fd/0")


def read_pickled(path: Path, bounds: Bounds) -> dict[str, RawTensor]:
    """Key to tensor of a state dict. The values are in a file without a name until they are read.

    Raises AdapterInvalidError, OSError.
    """
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
            return read_safetensors(read, bounds)
    said = done.stdout.decode(errors="replace").strip()
    raise AdapterInvalidError(said or f"{path.name} is not readable: {_end(done.returncode, file.size)}")


def _end(status: int, size: int) -> str:
    if -status in (signal.SIGXCPU, signal.SIGKILL):
        return f"it takes more than {_seconds(size)} s of processor time, or more memory than there is"
    return f"the process that reads it ended with status {status}"


def _seconds(size: int) -> int:
    return CPU_S + size // BYTES_PER_S


def limit_resources(size: int) -> None:
    """Of this process, beside what it has taken already. size: of the file."""
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
    """The file is at standard input; its tensors are written to `target`, or the reason is printed."""
    import torch

    torch.set_num_threads(1)
    limit_resources(os.fstat(0).st_size)
    try:
        found = read_torch(INPUT, name, Bounds(tensors=int(tensors)))
        for key, tensor in found.items():
            check_type(key, tensor)
        write_safetensors(Path(target), found)
    except AdapterInvalidError as error:
        print(error)
        return 1
    except OSError as error:
        print(f"{name} cannot be converted: {error.strerror}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
