"""Threads whose work can wait: they leave the processor to the engine while it wants it."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

__all__ = ["NICE", "step_back"]

NICE = 10  # about a tenth of a core that the engine wants too; all of one that it does not


def step_back() -> None:
    """Lower the priority of the calling thread, and of those that it starts from now on.

    For who reads, checks and lays out adapters: one that takes a little longer to load delays its own first
    request, a core taken from the engine delays every token of everybody. Only Linux has priorities of
    threads; elsewhere, and where they may not be set, nothing changes.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
