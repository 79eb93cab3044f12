"""Protects native/openmp.c: loops, single parts and nested regions are as OpenMP says, on torch's threads."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from manylora.kernels import native
from manylora.system.compiler import Source, compile_library, find_zig
from manylora.system.processor import find_levels

LOOPS = """
#include <stdint.h>
#include <unistd.h>
int omp_get_num_threads(void), omp_get_thread_num(void);
#define COUNT(i) __atomic_fetch_add(count + (i), 1, __ATOMIC_RELAXED)

/* How many of n counts are not what they should be. */
int64_t loops(int64_t n, int64_t *count) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) count[i] = 0;
#pragma omp parallel
    {
        for (int round = 0; round < 50; round++) { /* more loops than places for them */
#pragma omp for schedule(dynamic, 3) nowait
            for (int64_t i = 0; i < n; i++) COUNT(i);
        }
#pragma omp for
        for (int64_t i = 0; i < n; i++) COUNT(i);
#pragma omp for schedule(static, 2) nowait
        for (int i = (int)n - 1; i >= 0; i--) COUNT(i);
#pragma omp barrier
#pragma omp single
        for (int64_t i = 0; i < n; i++) wrong += count[i] != 52;
#pragma omp for schedule(dynamic)
        for (uint32_t i = 0; i < (uint32_t)n; i += 2) {
#pragma omp parallel for schedule(dynamic) if (n < 0)
            for (int k = 0; k < 3; k++) COUNT(i);
#pragma omp parallel for schedule(dynamic)
            for (int k = 0; k < 3; k++) COUNT(i);
        }
    }
    for (int64_t i = 0; i < n; i++) wrong += count[i] != (i % 2 ? 52 : 58);
    return wrong;
}

/* How often a thread met others and one of them had not come. */
int64_t meetings(int64_t rounds, int64_t *come) {
    int64_t wrong = 0;
    for (int i = 0; i < 8; i++) come[i] = 0;
#pragma omp parallel
    {
        const int threads = omp_get_num_threads(), one = omp_get_thread_num();
        for (int64_t round = 1; round <= rounds; round++) {
            if (round % 64 == one) usleep(200); /* the others sleep */
            __atomic_store_n(come + one, round, __ATOMIC_RELAXED);
#pragma omp barrier
            for (int i = 0; i < threads; i++)
                if (__atomic_load_n(come + i, __ATOMIC_RELAXED) < round)
                    __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
        }
    }
    for (int i = 0; i < 8; i++) wrong += come[i] && come[i] != rounds;
    return wrong;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    zig, levels = find_zig(), find_levels()
    if zig is None or not levels:
        pytest.skip("needs a compiler for this processor: pip install ziglang")
    folder = tmp_path_factory.mktemp("openmp")
    (folder / "loops.c").write_text(LOOPS, encoding="utf-8")
    openmp = next(file for file in native.SOURCE.files if file.name == "openmp.c")
    source = Source("loops", (folder / "loops.c", openmp), openmp=True)
    compile_library(zig, source, levels[-1], folder / "loops.so")
    library = ctypes.CDLL(str(folder / "loops.so"))
    for function in (library.loops, library.meetings):
        function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_int64, ctypes.c_void_p)
    return library


@pytest.mark.extended  # zig takes seconds for it
def test_each_iteration_is_done_once(library: ctypes.CDLL) -> None:
    """First without a runtime, as in a program without torch."""
    counts, before = np.zeros(500, np.int64), torch.get_num_threads()
    try:
        for threads in (None, 1, 2, 5):
            if threads is not None:
                native.use_openmp(library)
                torch.set_num_threads(threads)
            for count in (0, 1, 2, 7, 500):
                assert library.loops(count, counts.ctypes.data) == 0, (threads, count)
    finally:
        torch.set_num_threads(before)


@pytest.mark.extended
@pytest.mark.parametrize("threads", [2, 5])
def test_all_meet_whoever_is_late(library: ctypes.CDLL, threads: int) -> None:
    """5: more than there are processors, perhaps, so that they do not spin."""
    come, before = np.zeros(8, np.int64), torch.get_num_threads()
    native.use_openmp(library)
    try:
        torch.set_num_threads(threads)
        assert library.meetings(2000, come.ctypes.data) == 0
        assert np.count_nonzero(come) == threads
    finally:
        torch.set_num_threads(before)


def test_torchs_runtime_is_the_only_one() -> None:
    if native.load() is None:
        pytest.skip("there are no kernels here")
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
    names = [Path(name).name for name in mapped if "/" in name]
    assert len([name for name in names if name.startswith(("libgomp", "libiomp", "libomp"))]) == 1
