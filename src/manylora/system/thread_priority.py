"""Lower priority for background threads, so that they leave the processor to the engine."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

NICE = 10  # a thread gets about a tenth of a core that the engine needs too, and all of an idle one


def lower_priority() -> None:
    """Lower the priority of the calling thread, and of those that it starts from now on.

    For threads that load adapters: a slower load delays the first request of one adapter, but a core taken
    from the engine delays every token of every request. Only Linux has priorities of threads; elsewhere, and
    where they may not be set, nothing changes.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
