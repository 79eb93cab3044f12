"""What tests of models, kernels and engines start from. Without a GPU the kernels in the Triton language run
under its interpreter; it must be told before they are imported, and any test may import them."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import forked
import interpreting
import reference_copies
from levels import PARAMS, open_library, open_products

from manylora.kernels import native
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps
from manylora.ranks import rendezvous

reference_copies.begin()
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--all` it works as it is. Where nothing has imported triton, nothing is interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1" or request.config.option.all or "triton" not in sys.modules:
        yield
        return
    with interpreting.less_work():
        yield


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


@pytest.fixture(scope="session")
def forks() -> Iterator[forked.ForkServer]:
    """Starts ranks."""
    server = forked.ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def forked_ranks(forks: forked.ForkServer) -> Iterator[forked.ForkServer]:
    """Engines start their other ranks by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "spawn_ranks", forks.spawn_ranks)
        yield forks


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long generation of this process does not end by itself before a test has done what ends it."""
    from manylora.engine.engine import Engine

    step = Engine.step

    def slow(engine: Engine) -> Any:
        time.sleep(0.01)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)


@pytest.fixture
def held_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], threading.Event]]:
    """Call it with a number: engines of this process give so many steps' tokens, and then none before the
    event is set. Who has some by then did not wait for the end.
    """
    from manylora.engine.engine import Engine

    step, made = Engine.step, list[threading.Event]()

    def hold(after: int) -> threading.Event:
        numbers, go_on = itertools.count(), threading.Event()
        made.append(go_on)

        def held(engine: Engine) -> Any:
            found = step(engine)
            if any(event.token_ids for _, event in found) and next(numbers) >= after:
                assert go_on.wait(60)
            return found

        monkeypatch.setattr(Engine, "step", held)
        return go_on

    yield hold
    for go_on in made:
        go_on.set()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the demo's adapter folders, to be changed."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(DEMO / "adapters", folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for a module's models and adapters."""
    return tmp_path_factory.mktemp("workshop")


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """The OpenAI server on the demo's model and adapters."""
    from serving import Running

    with Running(lora_root=(DEMO / "adapters",)) as running:
        yield running
