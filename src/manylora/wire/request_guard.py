"""Protects tritonserver itself from requests that end it or keep it busy, over HTTP and gRPC.

Its front ends divide by zero when a client wants a text output classified, and they and the models take
seconds for a hundred thousand inputs, dimensions, parameters or strings. request_guard.c is preloaded into
it, stands between the front ends and the core, and refuses such a request with an error of its own.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from manylora.system.compiler import Source, find_common_library

logger = logging.getLogger("manylora.launcher")

SOURCE = Source("request_guard", (Path(__file__).with_suffix(".c"),))
KNOWN = b"\0TRITONSERVER_ServerModelBatchProperties\0"  # in the binary's table of the core's functions
PRELOAD = "LD_PRELOAD"


def preload_guard(binary: Path, environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment with which `binary`, a tritonserver, is guarded; the same if it cannot be, which is
    logged.

    folder: gets a copy of the library, because a cache may be emptied while the server runs.
    """
    try:
        guard = _copy_guard(binary, folder)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("tritonserver runs without its guard against hostile requests: %s", error)
        return dict(environment)
    others = environment.get(PRELOAD)
    return {**environment, PRELOAD: f"{guard}:{others}" if others else str(guard)}


def _copy_guard(binary: Path, folder: Path) -> Path:
    if KNOWN not in binary.read_bytes():
        raise OSError(f"{binary} has another form than is known")
    library = find_common_library(SOURCE)
    if library is None:
        raise OSError("it has to be compiled, and there is no C compiler (pip install ziglang)")
    guard = folder / f"{SOURCE.name}.so"
    if any(mark in str(guard) for mark in ": "):
        raise OSError(f"{folder} has a space or a colon in its name, which {PRELOAD} does not allow")
    guard.unlink(missing_ok=True)  # it may be loaded: never written to
    shutil.copyfile(library, guard)
    return guard
