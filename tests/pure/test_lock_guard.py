"""Protects lock_guard: who waits for a mutex of Triton's stub lets others have Python's lock meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manylora.wire import bls_worker

WAIT = """
import ctypes, threading, time
from manylora.wire import bls_worker
library = bls_worker.load()
lock = ctypes.PyDLL(library._name).lock_politely  # called with Python's lock, as the stub calls it
free = ctypes.CDLL(None)  # without
mutex = ctypes.create_string_buffer(64)
free.pthread_mutex_lock(mutex)
def end():
    time.sleep(0.05)
    free.pthread_mutex_unlock(mutex)
threading.Thread(target=end).start()
assert lock(mutex) == 0
assert free.pthread_mutex_trylock(mutex)
without = ctypes.CDLL(library._name).lock_politely
free.pthread_mutex_unlock(mutex)
assert without(mutex) == 0
threading.Thread(target=end).start()
assert without(mutex) == 0  # a thread that has not got Python's lock just waits
print("done")
"""


@pytest.fixture(autouse=True)
def with_a_compiler() -> None:
    if bls_worker.load() is None:
        pytest.skip("there is no compiler")


def test_others_have_pythons_lock_while_a_thread_waits_for_a_mutex() -> None:
    """In a process of its own: without lock_politely it would never end."""
    done = subprocess.run([sys.executable, "-c", WAIT], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr


def test_another_program_than_the_stub_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bls_worker, "load", lambda: pytest.fail("was changed"))
    bls_worker.share_lock()


def test_a_program_that_python_is_a_part_of_is_left_alone() -> None:
    """Its own mutexes would be changed with those of the program."""
    path = str(Path(sys.executable).resolve())
    program = f"""
from manylora.wire import bls_worker
import ctypes
library = bls_worker.load()

with open("/proc/self/maps") as maps:
    line = next(one for one in maps if " r-xp " in one and one.rstrip().endswith({path!r}))
inside = ctypes.c_void_p(int(line.split("-")[0], 16))
nothing = ctypes.c_void_p(0)
library.set_python(nothing, nothing, inside, nothing)
print(library.install())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n", done.stderr
