"""Protects the look at shapes before NumPy's: in C and in Python, and nobody but the binding is concerned."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from manylora.errors import RequestError
from manylora.wire import shape_guard

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


def test_the_client_hears_which_input_it_was() -> None:
    def tensor(name: str, shape: list[int], array: np.ndarray | None) -> SimpleNamespace:
        def as_numpy() -> np.ndarray:
            if array is None:
                raise TypeError("no such dtype in NumPy")
            return array

        return SimpleNamespace(name=lambda: name, shape=lambda: shape, as_numpy=as_numpy)

    ids = tensor("input_ids", [1, 2], np.ones((1, 2)))
    wide = tensor("lora_weights", [1, 2, 2], None)
    read = shape_guard.read_inputs([ids, wide], lambda tensor: np.zeros(tensor.shape()))
    assert {name: array.shape for name, array in read.items()} == {
        "input_ids": (1, 2),
        "lora_weights": (1, 2, 2),
    }
    for array in (np.empty(shape_guard.STAND_IN), None):
        bad = tensor("lora_weights", [1, 2**32, 2**32], array)
        with pytest.raises(RequestError, match="input lora_weights has the impossible shape"):
            shape_guard.read_inputs([ids, bad], lambda _: pytest.fail("was read"))
