"""Protects adapters that come back from unchanged files straight into their pages: they are what they were,
and one whose file changed meanwhile is nobody's answer and nobody else's loss."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_files import RowFile
from tiny_models import make_adapter, make_model, reference_generate

from manylora.adapters.cache import pool
from manylora.adapters.catalog import files
from manylora.adapters.tensors import FileAdapter
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.kernels import loading, native
from manylora.request import LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled kernels")
SHAPES = [(16, 64, 128), (16, 30, 77), (1, 5, 3), (5, 33, 100), (40, 48, 272), (64, 300, 15)]  # rank, in, out
NEW = 8
PROMPT = tuple(range(10, 22))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_rows_of_a_file_lie_in_their_pages(
    compiled: Any, tmp_path: Path, source: str, target: str, threads: int
) -> None:
    assert loading.can_read(target, source)
    assert not loading.can_read("float16", source) and not loading.can_read(target, "float16")
    made = RowFile(tmp_path / "rows", SHAPES, source, target, lambda a, b: np.concatenate((a, b.T), None), 10)

    def read(descriptor: int) -> bool:
        return loading.read_rows(descriptor, made.table, target, source, threads)

    assert made.read(read)
    made.check_memory()
    assert not any(made.read(read, content) for content in made.broken())
    assert made.read(read)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("stored")
    model = make_model(folder / "model", seed=1)
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapters = [
        make_adapter(
            folder / f"made{seed}", model, seed=seed, rank=rank, modules=modules, use_rslora=seed > 1
        )
        for seed, rank in ((1, 8), (2, 5), (3, 8), (4, 8))
    ]
    return model, adapters


def known(folder: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """<folder>/1, <folder>/2, …: copies whose times are to be trusted soon."""
    monkeypatch.setattr(files, "SETTLED_NS", 5 * 10**7)
    for number, adapter in enumerate(adapters, 1):
        shutil.copytree(adapter, folder / str(number))
    time.sleep(2 * files.SETTLED_NS / 1e9)


def open_engine(model: Path, folder: Path, adapters: int = 1) -> Engine:
    """With room for so many of the adapters."""
    page = 73728  # of one adapter of rank 8 with every module, and all that are smaller
    room = {"host_memory_bytes": adapters * page, "gpu_memory_bytes": adapters * page}
    lora = LoraCacheConfig(max_adapter_size=8, optimal_adapter_size=8, prefetch_dir=folder, **room)  # type: ignore[arg-type]
    config = EngineConfig(
        model, device="cpu", dtype="float32", max_seq_len=64, max_tokens_in_paged_kv_cache=1024, lora=lora
    )
    return Engine(config)


def run(engine: Engine) -> dict[int, tuple[list[int], Exception | None]]:
    found: dict[int, tuple[list[int], Exception | None]] = {}
    while engine.has_work:
        for handle, event in engine.step():
            assert event.last
            found[handle] = (list(event.token_ids), event.error)
    engine.check()
    return found


def ask(task_id: int | None) -> Request:
    lora = LoraInput(task_id) if task_id else None
    return Request(PROMPT, SamplingConfig(max_tokens=NEW), lora=lora)


def test_an_adapter_that_comes_back_answers_as_the_reference(
    workshop: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapters = workshop
    known(tmp_path, adapters, monkeypatch)
    monkeypatch.setattr(pool, "PARALLEL_BYTES", 0)
    engine = open_engine(model, tmp_path)
    right = {i: reference_generate(model, path, list(PROMPT), NEW) for i, path in enumerate(adapters, 1)}
    assert len(set(map(tuple, right.values()))) == len(adapters)
    for task_id in (1, 2, 3, 4, 1, 2, 3, 4):
        prepared = engine.prepare(ask(task_id))
        assert isinstance(prepared.adapters[0], FileAdapter)
        handle = engine.submit(prepared)
        assert run(engine) == {handle: (right[task_id], None)}
    assert engine.stats().adapters.source_loads == 8
    engine.close()


def test_who_asked_for_a_file_that_changed_is_told_and_nobody_else(
    workshop: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapters = workshop
    known(tmp_path, adapters[:3], monkeypatch)
    engine = open_engine(model, tmp_path, adapters=2)
    prepared = {task_id: engine.prepare(ask(task_id)) for task_id in (None, 1, 2)}
    shutil.copytree(adapters[3], tmp_path / "1", dirs_exist_ok=True)
    handles = {task_id: engine.submit(one) for task_id, one in prepared.items()}
    again = engine.submit(prepared[1])
    found = run(engine)
    told = "adapter 1 changed while it was loaded, please send the request again"
    assert [str(found[handle][1]) for handle in (handles[1], again)] == [told, told]
    for task_id, adapter in ((None, None), (2, adapters[1])):
        right = reference_generate(model, adapter, list(PROMPT), NEW)
        assert found[handles[task_id]] == (right, None)
    assert engine.stats().requests_failed == 2
    handle = engine.submit(engine.prepare(ask(1)))
    found = run(engine)
    assert found == {handle: (reference_generate(model, adapters[3], list(PROMPT), NEW), None)}
    engine.close()
