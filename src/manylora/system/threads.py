"""Keeps threads from taking CPU time from others: background threads, and OpenMP threads while they wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress

NICE = 10  # such a thread gets about a tenth of a contended core, and all of an idle one


def lower_priority() -> None:
    """Lower the priority of the calling thread, and of threads that it starts later, where that is allowed. A
    slower load delays one adapter's first request; a core taken from the engine delays every token.
    """
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def thread_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with a spin time of about 50 us, unless one is set: longer than the gap between
    operations. libgomp reads it when torch is imported; its default is milliseconds, on a core that others
    may need.
    """
    is_set = any(name in environment for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    return dict(environment) | ({} if is_set else {"GOMP_SPINCOUNT": "1000"})
