"""What tests of models, kernels and engines start from. Without a GPU the kernels in the Triton language run
under its interpreter; it must be told before they are imported, and any test may import them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import forked
import tiny_models
from levels import PARAMS, open_library, open_products

from manylora.kernels import native
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps
from manylora.ranks import rendezvous

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
load_transformers = tiny_models.load_transformers


def load_copy(model_dir: Path) -> Any:
    """In place of `load_transformers`: it reads each tiny model once for all adapters and references of a
    test, as to copy it takes a fifth of the time. And PEFT writes no model cards, which nobody reads."""
    from peft import PeftModel

    PeftModel.create_or_update_model_card = lambda *_: None  # type: ignore[method-assign]
    files = ((path.name, path.stat()) for path in sorted(Path(model_dir).iterdir()))
    stamp = tuple((name, found.st_ino, found.st_size, found.st_mtime_ns) for name, found in files)
    return copy.deepcopy(_loaded(Path(model_dir), stamp))


@lru_cache(maxsize=4)
def _loaded(model_dir: Path, stamp: tuple[tuple[str, int, int, int], ...]) -> Any:
    with torch.random.fork_rng(devices=()):  # what is drawn afterwards does not depend on this cache
        return load_transformers(model_dir)


tiny_models.load_transformers = load_copy


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """The interpreter of the Triton language with less to do: small kernels take half of the time. By itself
    it patches the language for every call of a function, and computes each sum of integers a second time in
    64 bits to see whether it fits. With `--all`, or another version of triton, it works as it is.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or request.config.option.all or "triton" not in sys.modules:
        yield
        return
    from triton.runtime import interpreter

    patch_language: Any = getattr(interpreter, "_patch_lang", None)
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    kept: dict[int, Any] = {}  # by module of kernels
    nothing = SimpleNamespace(restore=lambda: None)

    def patch_once(function: FunctionType) -> Any:
        module = id(function.__globals__)
        if module not in kept:
            kept[module] = patch_language(function)
        return nothing

    with pytest.MonkeyPatch.context() as patch:
        if patch_language is not None:
            patch.setattr(interpreter, "_patch_lang", patch_once)
        if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
            patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield
    for scope in reversed(kept.values()):
        scope.restore()


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
