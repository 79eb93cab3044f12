"""Protects memory that is used again: nobody gets what another still looks at."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from manylora.adapters import staging

LARGE = 2**21  # elements


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    staging.drop()
    yield
    staging.drop()


def place(values: np.ndarray) -> int:
    return values.ctypes.data


def test_memory_is_used_again_once_its_last_view_is_gone() -> None:
    whole = staging.take(LARGE)
    assert (whole.shape, whole.dtype, whole.flags.writeable) == ((LARGE,), np.float32, True)
    first, view = place(whole), whole[5:].reshape(3, -1)[1]
    view[:] = 3
    del whole
    other = staging.take(LARGE)
    assert place(other) != first
    other[:] = 4
    assert (view == 3).all()
    del view  # kept last, so given first; the room of `other` is still in use
    assert place(staging.take(LARGE)) == first
    assert (other == 4).all()


def test_a_smaller_one_fits_and_a_larger_one_gets_its_own() -> None:
    whole = staging.take(2 * LARGE)
    first = place(whole)
    del whole
    less = staging.take(LARGE)
    assert place(less) == first
    del less
    more = staging.take(4 * LARGE)
    more[:] = 1
    assert more.size == 4 * LARGE


def test_threads_never_share() -> None:
    wrong = []

    def use(number: int) -> None:
        for _ in range(40):
            mine = staging.take(LARGE)
            mine[::4096] = number
            if not (mine[::4096] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
