"""Protects what stands between tritonserver and its models: mutexes without Python's lock, shapes before
NumPy sees them, requests that the server could not bear, and responses of other models."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
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
from manylora.system.compiler import find_compiler

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


CORE = """
#include <string.h>
#include <stdint.h>
const char *TRITONSERVER_ErrorNew(int code, const char *text) { return strdup(text); }
const char *TRITONSERVER_ServerNew(void) { return 0; }
const char *TRITONSERVER_InferenceRequestNew(void **r, void *s, const char *m, int64_t v) { return "new"; }
const char *TRITONSERVER_InferenceRequestSetId(void *r, const char *id) { return "id"; }
const char *TRITONSERVER_InferenceRequestAddInput(void *r, const char *n, int t, const int64_t *s, uint64_t d)
{ return "input"; }
const char *TRITONSERVER_InferenceRequestSetDoubleParameter(void *r, const char *n, double v)
{ return v == 0.5 ? "parameter" : "changed"; }
const char *TRITONSERVER_ServerModelBatchProperties(void *s, const char *m, int64_t v, uint32_t *f, void **p)
{ return "properties"; }
"""
FRONT = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
const char *TRITONSERVER_ServerNew(void);
const char *TRITONSERVER_InferenceRequestNew(void **, void *, const char *, int64_t);
const char *TRITONSERVER_InferenceRequestSetId(void *, const char *);
const char *TRITONSERVER_InferenceRequestAddInput(void *, const char *, int, const int64_t *, uint64_t);
const char *TRITONSERVER_InferenceRequestSetDoubleParameter(void *, const char *, double);
const char *TRITONSERVER_ServerModelBatchProperties(void *, const char *, int64_t, uint32_t *, void **);
static int64_t shape[32] = {1, 65536, 1, 1};
static char id[1026];
static void input(int type, int dimensions)
{ puts(TRITONSERVER_InferenceRequestAddInput(0, "a", type, shape, dimensions)); }
int main(void)
{
    TRITONSERVER_ServerNew();
    puts(TRITONSERVER_InferenceRequestNew(0, 0, "m", 1));
    memset(id, 'x', 1024);
    puts(TRITONSERVER_InferenceRequestSetId(0, id));
    id[1024] = 'x';
    puts(TRITONSERVER_InferenceRequestSetId(0, id));
    for (int i = 4; i < 32; i++) shape[i] = 1;
    input(13, 16); input(13, 17);
    shape[2] = 2; input(13, 4); input(8, 4);
    shape[2] = INT64_MAX; input(13, 4);
    shape[2] = -1; input(13, 4);
    for (int i = 0; i < 1020; i++) TRITONSERVER_InferenceRequestSetDoubleParameter(0, "p", 0.5);
    puts(TRITONSERVER_InferenceRequestSetDoubleParameter(0, "p", 0.5));
    puts(TRITONSERVER_InferenceRequestSetDoubleParameter(0, "p", 0.5));
    TRITONSERVER_InferenceRequestNew(0, 0, "m", 1);
    puts(TRITONSERVER_InferenceRequestSetDoubleParameter(0, "p", 0.5));
    puts(TRITONSERVER_ServerModelBatchProperties(0, "m", 1, 0, 0));
    puts(getenv("LD_PRELOAD") ? getenv("LD_PRELOAD") : "nothing");
}
"""
EXPECTED = [
    "new", "id", "the id of a request has at most 1024 bytes", "input",
    "input 'a' has 17 dimensions, of at most 16", "input 'a' has 131072 strings, of at most 65536", "input",
    "input 'a' has 9223372036854775807 strings, of at most 65536", "input", "parameter",
    "a request has at most 1024 inputs, outputs and parameters", "parameter",
    "outputs cannot be classified: leave out their parameter 'classification'",
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that calls a library as tritonserver's front ends call its core."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no compiler")
    folder = tmp_path_factory.mktemp("server")
    (folder / "core.c").write_text(CORE)
    (folder / "front.c").write_text(FRONT)
    core = str(folder / "libcore.so")
    quiet = [*compiler.command, "-w"]
    subprocess.run([*quiet, "-shared", "-fPIC", str(folder / "core.c"), "-o", core], check=True)
    program = folder / "front"
    link = [core, f"-Wl,-rpath,{folder}"]
    subprocess.run([*quiet, str(folder / "front.c"), *link, "-o", str(program)], check=True)
    return program


def lines(server: Path, environment: dict[str, str]) -> list[str]:
    ran = subprocess.run([server], env=environment, capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    return ran.stdout.splitlines()


@pytest.mark.parametrize("others", ["", "libc.so.6:libm.so.6"])
def test_it_refuses_in_the_server_and_leaves_its_environment(
    server: Path, tmp_path: Path, others: str
) -> None:
    given = dict(os.environ) | ({"LD_PRELOAD": others} if others else {})
    assert lines(server, given)[2:4] == ["id", "input"]
    environment = preload_guard(server, given, tmp_path)
    assert lines(server, environment) == [*EXPECTED, others or "nothing"]
    shell = subprocess.run(
        ["sh", "-c", "printenv LD_PRELOAD"], env=environment, capture_output=True, text=True, check=True
    )
    assert shell.stdout.strip() == environment["LD_PRELOAD"], "a script that starts tritonserver passes it on"


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
