"""What several tests start from. Without a GPU the kernels in the Triton language run under its interpreter;
it must be told before they are imported, and any test may import them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from manylora.kernels import native
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo"
needs_compiler = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")), reason="needs a C compiler"
)


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_compiler)])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    """The CPU's operations without and with the compiled kernels."""
    if request.param == "torch":
        return CpuOps()
    library = native.load()
    assert library is not None
    return CompiledOps(library)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For matrices so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the demo's adapter folders, to be changed."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(DEMO / "adapters", folder, dirs_exist_ok=True)
    return folder
