"""Keeps Triton's stub from deadlocking when several threads read streams of another model.

A thread that takes a response from a stream waits for the GIL while it holds the stream's mutex. The stub's
own thread, which delivers the next response, waits for that mutex while it holds the mutex of all streams. A
thread that opens a stream waits for the latter while it holds the GIL. This is a deadlock. With `share_lock`
a thread that has to wait for a mutex of the stub releases the GIL meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from pathlib import Path

from manylora.system.compiler import Source, load_library

logger = logging.getLogger("manylora")

STUB = "triton_python_backend_stub"
SOURCE = Source("lock_guard", (Path(__file__).with_suffix(".c"),))
OF_PYTHON = (
    "_PyThreadState_UncheckedGet", "PyGILState_GetThisThreadState", "PyEval_SaveThread",
    "PyEval_RestoreThread",
)  # fmt: skip


def share_lock() -> None:
    """Apply this to the process if it is Triton's stub. Without a compiler nothing changes, and the launcher
    restarts a server with a blocked process.
    """
    if not _is_stub():
        return
    try:
        library = load()
        if library is not None and not library.install():
            logger.warning("%s has another form than is known: its mutexes are as they were", STUB)
    except (AttributeError, OSError, subprocess.SubprocessError) as error:
        logger.warning("mutexes of %s are as they were: %s", STUB, error)


def load() -> ctypes.CDLL | None:
    """lock_guard.c; None without a compiler. Raises OSError, subprocess.SubprocessError, and AttributeError
    if Python lacks a function.
    """
    library = load_library(SOURCE)
    if library is None:
        return None
    library.set_python(*(ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in OF_PYTHON))
    return library


def _is_stub() -> bool:
    try:
        return Path("/proc/self/exe").readlink().name == STUB
    except OSError:
        return False
