"""What several tests start from. Without a GPU the kernels in the Triton language run under its interpreter;
it must be told before they are imported, and any test may import them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import manylora  # noqa: F401 before torch, whose threads then spin as briefly as those of a server

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the commands that tests start inherit it

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from levels import NAMES, open_library, open_products

from manylora.kernels import native
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps

SLOW = "is slow: make test-slow"
DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason=SLOW))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests of servers, which wait more than they compute. The others take the rest, file
    by file."""
    from xdist.scheduler import LoadFileScheduling

    class ServersTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "server" if nodeid.startswith("tests/server/") else super()._split_scope(nodeid)

    return ServersTogether(config, log)


@pytest.fixture(params=["torch", *NAMES])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    """The CPU's operations without and with the compiled kernels, for each level of instruction sets."""
    return CpuOps() if request.param == "torch" else CompiledOps(open_library(request.param))


@pytest.fixture(params=NAMES)
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
