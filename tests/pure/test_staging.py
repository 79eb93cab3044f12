"""Protects memory that is used again: nobody gets what another still looks at."""

from __future__ import annotations

import threading

import numpy as np

from manylora.adapters import staging

LARGE = 2**21  # elements


def place(values: np.ndarray) -> int:
    return values.ctypes.data


def test_memory_is_used_again_once_its_last_view_is_gone() -> None:
    whole = staging.take(LARGE)
    assert (whole.shape, whole.dtype, whole.flags.writeable) == ((LARGE,), np.float32, True)
    first, view = place(whole), whole[5:].reshape(3, -1)[1]
    view[:] = 3
    del whole
    larger = staging.take(2 * LARGE)
    assert place(larger) != first
    larger[:] = 4
    assert (view == 3).all()
    del view  # kept last, so given first; the room of `larger` is still in use
    assert place(staging.take(LARGE // 2)) == first
    assert (larger == 4).all()


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
