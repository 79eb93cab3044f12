"""Protects output tensors that are used again: the binding saves one for the server without a lock."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MODEL = Path(__file__).resolve().parents[2] / "model_repo" / "postprocessing" / "1" / "model.py"


class Binding(ModuleType):
    """In place of what a model's process has from the server. A response is the list of its tensors."""

    InferenceRequest = TritonError = TritonModelException = object
    InferenceResponse = list

    class Tensor:
        def __init__(self, name: str, array: Any) -> None:
            self.content = name, array.tolist()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    name = "triton_python_backend_utils"
    monkeypatch.setitem(sys.modules, name, Binding(name))
    spec = importlib.util.spec_from_file_location("postprocessing_model", MODEL)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_short_text_has_one_tensor_in_each_thread(model: ModuleType) -> None:
    texts = [(b"",), (b" the",), (b"",)]
    served = model.TritonPythonModel()
    served._postprocessor = SimpleNamespace(run=lambda inputs: inputs)

    def respond() -> list[Any]:
        return [tensor for text in texts for tensor in served._respond(text)]

    mine = respond()
    assert [tensor.content for tensor in mine] == [("OUTPUT", list(text)) for text in texts]
    assert mine[0] is mine[2] is not mine[1]
    assert respond() == mine
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(respond).result()
    assert not {id(tensor) for tensor in mine} & {id(tensor) for tensor in theirs}
    assert [tensor.content for tensor in theirs] == [tensor.content for tensor in mine]
    [long] = served._respond((b"x" * 65,))
    assert served._respond((b"x" * 65,)) != [long]
