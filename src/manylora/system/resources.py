"""Memory and processors that this process may use, and freed memory that it keeps.

Limits are those of its control groups, which containers, services and batch systems set. They apply at each
level, from the process's own group up to the root. Both versions of the interface are read. In a container
the root of /sys/fs/cgroup may be the container's own group.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED = 2**62
MAX_FREE = 2**28  # free bytes that are not returned to the system
# Options of glibc's mallopt.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8


def usable_processors() -> int:
    """How many threads can compute at once: more would use up a group's CPU time early, then wait."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _cpu_quotas())]))


def available_memory() -> int:
    """Bytes that the groups and `ulimit -v` still allow. UNLIMITED or more without a limit."""
    left = [UNLIMITED, *_left_in_groups()]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            left.append(limit - int(_read(Path("/proc/self/statm")).split()[0]) * resource.getpagesize())
    return max(0, min(left))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _cpu_quotas() -> Iterator[float]:
    """In processors, of each group that has one."""
    for folder in _groups("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = map(int, _read(folder / "cpu.max").split())
            yield quota / period
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota = int(_read(folder / "cpu.cfs_quota_us"))
            if quota > 0:
                yield quota / int(_read(folder / "cpu.cfs_period_us"))


def _left_in_groups() -> Iterator[int]:
    """Files that were read once count as used, but are dropped when memory is needed."""
    for folder in _groups("memory"):
        for limit, usage, dropped in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError):
                left = int(_read(folder / limit)) - int(_read(folder / usage))
                with suppress(OSError, ValueError):
                    statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                    left += int(statistics.get(dropped, 0))
                yield left


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the groups of this process that may limit it, its own first."""
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    rows = (line.split(":", 2) for line in lines if line.count(":") > 1)
    ours = {name: path for _, names, path in rows for name in names.split(",")}
    for mount, path in ((ROOT / controller, ours.get(controller, "/")), (ROOT, ours.get("", "/"))):
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # outside what this process sees
            parts = []
        for count in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:count])


def keep_memory() -> None:
    """Let all threads use up to MAX_FREE freed bytes. Only glibc can.

    By default, freed blocks of many megabytes are returned to the system at once, and the next step has a
    page fault for each of their pages: up to a tenth of the time of prompts on a CPU.
    """
    for option, value in ((ARENA_MAX, 1), (MMAP_THRESHOLD, MAX_FREE), (TRIM_THRESHOLD, MAX_FREE)):
        with suppress(AttributeError):
            ctypes.CDLL(None).mallopt(option, value)


def release_free_memory() -> None:
    """Return free memory to the system. Call this after freeing much that is not needed again soon."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
