"""Protects the engine's cores: threads that load adapters, and what they start, have a lower priority."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from manylora.system.threads import NICE, lower_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_that_steps_back_takes_its_own_threads_with_it_and_nobody_else() -> None:
    before = priority()
    with ThreadPoolExecutor(1, "back", lower_priority) as back, ThreadPoolExecutor(1) as beside:
        assert back.submit(priority).result() == max(before, NICE)
        with back.submit(ThreadPoolExecutor, 1).result() as own:
            assert back.submit(lambda: own.submit(priority).result()).result() == max(before, NICE)
        assert beside.submit(priority).result() == before
    assert priority() == before


def test_a_thread_that_is_lower_already_stays_there() -> None:
    def lowest() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        lower_priority()
        return priority()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lowest).result() == 19
