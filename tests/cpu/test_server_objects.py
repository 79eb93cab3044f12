"""Protects objects that the server's binding made. It saves output tensors without a lock, and what refers to
the server's memory must be freed before that is."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

MODELS = Path(__file__).resolve().parents[2] / "model_repo"
NAMES = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls", "vllm_model", "llmapi")


class Binding(ModuleType):
    """In place of what a model's process has from the server. A response is the list of its tensors."""

    InferenceRequest = MetricFamily = Metric = TritonError = TritonModelException = object
    InferenceResponse = list

    class Tensor:
        def __init__(self, name: str, array: Any) -> None:
            self.content = name, array.tolist()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        folder = MODELS / name / "1"
        monkeypatch.syspath_prepend(str(folder))
        spec = importlib.util.spec_from_file_location(f"{name}_model", folder / "model.py")
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made

    binding = "triton_python_backend_utils"
    monkeypatch.setitem(sys.modules, binding, Binding(binding))
    return load


def test_a_short_text_has_one_tensor_in_each_thread(load: Callable[[str], ModuleType]) -> None:
    texts = [(b"",), (b" the",), (b"",)]
    served = load("postprocessing").TritonPythonModel()
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


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_ends_leaves_nothing_for_later(load: Callable[[str], ModuleType], name: str) -> None:
    served = load(name).TritonPythonModel()
    tensor = Binding.Tensor("OUTPUT", np.zeros(1))
    served._worker = SimpleNamespace(close=lambda: None, tensor=tensor, respond=served)
    served._worker.itself = served._worker
    served._end = lambda: None
    freed = weakref.ref(tensor)
    del tensor
    gc.collect()
    gc.disable()
    try:
        served.finalize()
        assert freed() is None
    finally:
        gc.enable()
