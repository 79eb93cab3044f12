"""What tests of models, kernels and engines start from. Without a GPU the kernels in the Triton language run
under its interpreter; it must be told before they are imported, and any test may import them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from levels import PARAMS, open_library, open_products

from manylora.kernels import native
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


@pytest.fixture(params=["torch", *PARAMS])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    """The CPU's operations without and with the compiled kernels, for each level of instruction sets."""
    return CpuOps() if request.param == "torch" else CompiledOps(open_library(request.param))


@pytest.fixture(params=PARAMS)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The compiled kernels of each level, which are this process's meanwhile."""
    library = open_library(request.param)
    monkeypatch.setattr(native, "loaded", lambda: library)
    return library


@pytest.fixture
def emulated() -> Any:
    """The compiled kernels, with products that this processor may not have in plain C."""
    return open_products()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For matrices so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long generation of this process does not end by itself before a test has done what ends it."""
    from manylora.engine.engine import Engine

    step = Engine.step

    def slow(engine: Engine) -> Any:
        time.sleep(0.01)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the demo's adapter folders, to be changed."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(DEMO / "adapters", folder, dirs_exist_ok=True)
    return folder
