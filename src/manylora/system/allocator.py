"""Settings of the C library's allocator.

By default, freed blocks of many megabytes are returned to the system at once, and the next step has a page
fault for each of their pages: up to a tenth of the time of prompts on a CPU.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

MAX_FREE = 2**28  # free bytes that are not returned to the system
# Options of glibc's mallopt.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8


def keep_memory() -> None:
    """Let all threads use up to MAX_FREE freed bytes. Only glibc can."""
    for option, value in ((ARENA_MAX, 1), (MMAP_THRESHOLD, MAX_FREE), (TRIM_THRESHOLD, MAX_FREE)):
        with suppress(AttributeError):
            ctypes.CDLL(None).mallopt(option, value)


def release_free_memory() -> None:
    """Return free memory to the system. Call this after freeing much that is not needed again soon."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
