"""Protects what stands between tritonserver and its models: mutexes without Python's lock, shapes before
NumPy sees them, requests that the server could not bear, and responses of other models."""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manylora.doors.triton import bls_worker, shape_guard
from manylora.doors.triton.bls_worker import ServerCalls
from manylora.doors.triton.launcher import server_command
from manylora.doors.triton.launcher.server_command import KNOWN, preload_guard
from manylora.errors import RequestError

WAIT = """
import ctypes, threading, time
from manylora.doors.triton import bls_worker
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


GOOD = [(), (0,), (3,), (1, 2, 3), (1, 0, 2**58), (2**3, 1)]
IMPOSSIBLE = [
    (1, 2**63 - 1, 2**63 - 1), (1, 2**32, 2**32), (2**62 + 1,), (1, 0, 2**63 - 1), (1, -2, -2), (1,) * 33,
]  # fmt: skip


class Binding:
    """As Triton's: it looks NumPy's function up once, when it first makes a tensor."""

    def __init__(self) -> None:
        self.address = 0

    def Tensor(self, name: str, array: np.ndarray) -> None:  # noqa: N802
        self.address = self.address or entry()

    def read(self, shape: tuple[int, ...], data: np.ndarray) -> np.ndarray:
        make = ctypes.PYFUNCTYPE(ctypes.py_object, *shape_guard.NewFromDescr._argtypes_)(self.address)
        dtype, sizes = np.dtype(np.int32), (ctypes.c_int64 * len(shape))(*shape)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dtype))  # the function takes one
        where = ctypes.addressof(sizes)
        return make(id(np.ndarray), id(dtype), len(shape), where, None, data.ctypes.data, 0, None)


def entry() -> int:
    address = shape_guard._numpy_functions() + 8 * shape_guard.NEW_FROM_DESCR
    return shape_guard.POINTER.from_address(address).value


@pytest.mark.parametrize("native", ["1", "0"])
def test_impossible_shapes_become_stand_ins_and_others_stay(monkeypatch, native: str) -> None:
    monkeypatch.setenv("MANYLORA_NATIVE", native)
    made, before = Binding(), entry()
    shape_guard.check_shapes(made)
    assert made.address != before
    assert entry() == before
    data = np.arange(8, dtype=np.int32)
    for shape in GOOD:
        array = made.read(shape, data)
        assert array.shape == shape
        assert array.reshape(-1).tolist() == data[: array.size].tolist()
    for shape in IMPOSSIBLE:
        assert made.read(shape, data).shape == shape_guard.STAND_IN


@pytest.mark.parametrize(
    ("why", "text"),
    [("form", "another form"), ("compiler", "no C compiler"), ("folder", "a space or a colon")],
)
def test_without_it_the_server_starts_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str, text: str
) -> None:
    server, folder = tmp_path / "tritonserver", tmp_path / ("a b" if why == "folder" else "a")
    server.write_bytes(b"" if why == "form" else b"\x7fELF" + KNOWN)
    folder.mkdir()
    library = None if why == "compiler" else server
    monkeypatch.setattr(server_command, "find_common_library", lambda source: library)
    with caplog.at_level(logging.WARNING, "manylora.launcher"):
        assert preload_guard(server, {"a": "b"}, folder) == {"a": "b"}
    assert len(caplog.messages) == 1
    assert text in caplog.text


class Responses:
    """As the stub's iterator. fails: the only response is an error."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def __iter__(self) -> Iterator[Any]:
        tensor = SimpleNamespace(name=lambda: "out")
        error = SimpleNamespace(code=lambda: 0, message=lambda: "no")
        yield SimpleNamespace(
            has_error=lambda: self.fails, error=lambda: error, output_tensors=lambda: [tensor]
        )


@pytest.mark.parametrize("fails", [False, True])
def test_responses_outlive_their_call(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    given: list[weakref.ref[Responses]] = []

    def request(**_: Any) -> Any:
        def run(decoupled: bool) -> Responses:
            assert decoupled
            made = Responses(fails)
            given.append(weakref.ref(made))
            return made

        return SimpleNamespace(exec=run)

    calls = ServerCalls(
        SimpleNamespace(InferenceRequest=request, Tensor=None, TritonError=SimpleNamespace(UNAVAILABLE=1))
    )

    def call() -> None:
        try:
            assert [set(one) for one in calls.call("engine", {}, ["out"], "id")] == [{"out"}]
        except RequestError as error:
            assert fails and str(error) == "no"

    call()
    call()
    gc.collect()
    assert all(one() is not None for one in given)
    monkeypatch.setattr(bls_worker, "KEPT_S", -1.0)
    call()
    gc.collect()
    assert given[0]() is None and given[1]() is None
