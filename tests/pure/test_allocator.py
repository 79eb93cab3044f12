"""Protects the memory of a step from going back to the system before the next one wants it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults of taking and filling 64 MB the second time, in blocks that the C library maps on their own.
CODE = """
import ctypes, resource
from manylora.system.allocator import keep_memory
{call}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def step():
    places = [libc.malloc(2**23) for _ in range(8)]
    for place in places:
        ctypes.memset(place, 1, 2**23)
    for place in places:
        libc.free(place)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_what_is_freed_is_taken_again_without_faults() -> None:
    def faults(call: str) -> int:
        done = subprocess.run([sys.executable, "-c", CODE.format(call=call)], capture_output=True, check=True)
        return int(done.stdout)

    assert faults("assert keep_memory()") < 8 <= faults("") / 4
