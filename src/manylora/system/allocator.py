"""The C library's memory, kept for the next step.

Freed blocks of many megabytes go back to the system at once, and a step that takes them again pays for each
of their pages: up to a tenth of the time of prompts on a CPU.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

__all__ = ["give_back", "keep_memory"]

KEPT = 2**28  # bytes at most that are free and not given back
# Options of glibc's mallopt.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8


def keep_memory() -> bool:
    """Let this process keep what it frees, up to KEPT, and let threads share it. Whether the C library can;
    others than glibc are left alone."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((ARENA_MAX, 1), (MMAP_THRESHOLD, KEPT), (TRIM_THRESHOLD, KEPT))
    return all(mallopt(option, value) == 1 for option, value in settings)


def give_back() -> None:
    """Return free memory to the system, for who has just freed much more than is needed again soon."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
