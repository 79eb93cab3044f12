"""Protects the disk level of the adapter cache: who sent an adapter once may ask for it by its id alone, also
after its eviction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from tiny_models import make_model
from waiting import wait_for

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.engine.loop import EngineLoop
from manylora.errors import AdapterNotCachedError
from manylora.request import Event, LoraInput, Request, SamplingConfig

HIDDEN, RANK, LAYERS = 64, 8, 2
CONFIG = np.array([[[1, layer, RANK, 0] for layer in range(LAYERS)]], np.int32)
PAGE_BYTES = 4 * (HIDDEN + HIDDEN // 2) * RANK * LAYERS * 4
FOLDER = "copies"


def adapter(task_id: int) -> LoraInput:
    values = np.random.default_rng(task_id).normal(size=(1, LAYERS, RANK * 2 * HIDDEN))
    return LoraInput(task_id, values.astype(np.float32), CONFIG)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("disk") / "model")


def start(model: Path, folder: Path | None, num_bytes: int = 2**30) -> EngineLoop:
    """With room for one adapter."""
    lora = LoraCacheConfig(
        max_adapter_size=RANK,
        host_memory_bytes=PAGE_BYTES,
        gpu_memory_bytes=PAGE_BYTES,
        target_modules=("attn_q",),
        disk_cache_dir=folder,
        disk_cache_bytes=num_bytes,
    )
    return EngineLoop(
        Engine(EngineConfig(model, "cpu", "float32", max_tokens_in_paged_kv_cache=512, lora=lora))
    )


@pytest.fixture
def loops() -> Iterator[list[EngineLoop]]:
    made: list[EngineLoop] = []
    yield made
    for loop in made:
        loop.close()


def ask(loop: EngineLoop, lora: LoraInput) -> tuple[int, ...]:
    """Its tokens. Raises what the request ended with."""
    answers: SimpleQueue[Event] = SimpleQueue()
    loop.submit(Request(tuple(range(9)), SamplingConfig(max_tokens=6), lora=lora), answers.put)
    event = answers.get(timeout=60)
    if event.error is not None:
        raise event.error
    return event.token_ids


def copies(folder: Path) -> set[str]:
    """They are written on a thread of their own, after the answer."""
    return {path.name for path in folder.glob("*.safetensors")}


def test_an_evicted_adapter_is_found_by_its_id(model: Path, tmp_path: Path, loops: list[EngineLoop]) -> None:
    folder = tmp_path / FOLDER
    loops.append(start(model, folder))
    sent = {task_id: ask(loops[0], adapter(task_id)) for task_id in range(4)}
    assert len(set(sent.values())) > 1
    wait_for(lambda: len(copies(folder)) == 4)
    for task_id in (2, 0, 3, 1, 0):
        assert ask(loops[0], LoraInput(task_id)) == sent[task_id]
    assert loops[0].stats().adapters.host_adapters == 1
    for file in folder.iterdir():  # what is damaged counts as absent, and is written again
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    with pytest.raises(AdapterNotCachedError, match="Please send LoRA weights with request"):
        ask(loops[0], LoraInput(2))
    assert len(copies(folder)) == 3
    assert ask(loops[0], adapter(2)) == sent[2]
    assert ask(loops[0], adapter(1)) == sent[1]
    wait_for(lambda: len(copies(folder)) == 4)
    assert ask(loops[0], LoraInput(2)) == sent[2]
    # Another process has the copies, but ids are told by requests.
    loops.append(start(model, folder))
    with pytest.raises(AdapterNotCachedError):
        ask(loops[1], LoraInput(2))


def test_without_a_folder_nothing_is_kept(model: Path, loops: list[EngineLoop]) -> None:
    loops.append(start(model, None))
    ask(loops[0], adapter(0))
    ask(loops[0], adapter(1))
    with pytest.raises(AdapterNotCachedError):
        ask(loops[0], LoraInput(0))
