"""Protects adapters that share matrices (VeRA, PVeRA): A and B are in the cache once for all of them, found
by content, and gone with the last one; the answers are PEFT's, in any company, evicted and back."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from running import run, tokens
from safetensors.torch import load_file, save_file
from tiny_models import load_transformers, make_adapter, make_kind, make_model

from manylora.adapters.bounds import Bounds
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.peft_folder import read_peft_whole
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.modules import lora_modules
from manylora.adapters.tensors import Adapter, adapter_from_rows
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput, Request, SamplingConfig, mix

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KEYS = ["q_proj", "v_proj"]
RANK, NEW = 16, 6
DRAWN = {"r": RANK, "save_projection": False}


def settings() -> list[peft.PeftConfig]:
    """By task id. The first three draw the same matrices; the last of these has fewer modules."""
    return [
        peft.VeraConfig(target_modules=ALL, **DRAWN),
        peft.VeraConfig(target_modules=ALL, **DRAWN),
        peft.VeraConfig(target_modules=["v_proj", "up_proj", "down_proj"], **DRAWN),
        peft.VeraConfig(target_modules=KEYS, projection_prng_key=7, **DRAWN),
        peft.VeraConfig(target_modules=ALL, r=5),
        peft.PveraConfig(target_modules=ALL, r=6),
        peft.VBLoRAConfig(r=4, num_vectors=9, vector_length=16, topk=2, target_modules=KEYS),
    ]


class World:
    def __init__(self, path: Path) -> None:
        self.model = make_model(path / "model", "llama", seed=4)
        self.folder = path / "adapters"
        for number, config in enumerate(settings()):
            make_kind(self.folder / str(number), self.model, config, number, 1.0)
        make_adapter(self.folder / "7", self.model, 7, 8, tuple(KEYS))
        self.count = 8
        self.config = read_model_config(self.model)
        self.modules = lora_modules(self.config)

    def engine(self, **sizes: int) -> Engine:
        lora = {"gpu_memory_bytes": 2**24, "host_memory_bytes": 2**24, "max_adapter_size": RANK, **sizes}
        cache = LoraCacheConfig(prefetch_dir=self.folder, **lora)  # type: ignore[arg-type]
        return Engine(EngineConfig(self.model, device="cpu", dtype="float32", max_seq_len=64, lora=cache))

    def read(self, number: int, shared: bool = True, **options: object) -> Adapter:
        given = ReadOptions(self.modules, BaseWeights(self.model), shared=shared, **options)  # type: ignore[arg-type]
        content = read_peft_whole(self.folder / str(number), given)
        rows, extras = content.rows, content.extras
        return adapter_from_rows(rows, extras=extras)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    made = world.engine()
    yield made
    made.check()
    made.close()


def answers(made: Engine, *asked: tuple[object, int]) -> list[list[int]]:
    requests = [
        Request(tuple(tokens(4 + 7 * length, length)), SamplingConfig(NEW), lora=lora)  # type: ignore[arg-type]
        for lora, length in asked
    ]
    found = run(made, *requests)
    assert all(events[-1].error is None for events in found)
    return [[token for event in events for token in event.token_ids] for events in found]


def test_all_answer_as_peft_does_together_alone_and_after_they_were_evicted(
    world: World, engine: Engine
) -> None:
    asked = [(LoraInput(number), number % 3) for number in range(world.count)]
    found = answers(engine, *asked, (None, 1))
    for (lora, length), answer in zip(asked, found, strict=False):
        folder, prompt = str(world.folder / str(lora.task_id)), tokens(4 + 7 * length, length)
        reference = peft.PeftModel.from_pretrained(load_transformers(world.model), folder).eval()
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer, lora.task_id
    assert len(set(map(tuple, found))) == len(found)
    assert [answers(engine, one)[0] for one in asked] == found[:-1]
    for number in range(world.count):
        digest = engine.adapters.library.digest(number)
        assert digest is not None
        engine.adapters.drop(digest)
    stats = engine.adapters.stats()
    assert stats.host_pages_free == stats.host_pages, "what was shared has gone with the last"
    assert answers(engine, *asked) == found[:-1]


def test_what_is_shared_is_in_the_cache_once(engine: Engine) -> None:
    """The second adapter brings its vectors alone, one of another key its own matrices."""
    used = [0]
    for number in (0, 1, 3):
        answers(engine, (LoraInput(number), 1))
        stats = engine.adapters.stats()
        used.append(stats.device_pages - stats.device_pages_free)
    first, second, other = (after - before for before, after in itertools.pairwise(used))
    assert second < first and second < other


def test_a_mix_is_the_sum_of_each(world: World, engine: Engine) -> None:
    """In logits, of one layer's depth: the same adapter in two halves is itself."""
    params = SamplingConfig(2, return_generation_logits=True)
    loras = [LoraInput(0), mix([(LoraInput(0), 0.25), (LoraInput(0), 0.75)])]
    half = mix([(LoraInput(0), 0.5)])
    found = run(engine, *[Request((5, 6, 7), params, lora=lora) for lora in (*loras, half)])
    logits = [events[0].generation_logits for events in found]
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    assert np.abs(logits[0] - logits[2]).max() > 1e-3


def test_sizes_are_judged_before_anything_of_them_is_made(world: World, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    shutil.copytree(world.folder / "0", hostile)
    tensors = load_file(hostile / "adapter_model.safetensors")
    name = next(key for key in tensors if key.endswith("q_proj.vera_lambda_b"))
    save_file({**tensors, name: torch.zeros(2**20)}, hostile / "adapter_model.safetensors")
    options = ReadOptions(world.modules, BaseWeights(world.model), shared=True)
    with pytest.raises(AdapterInvalidError, match=r"1048576 numbers in vera_lambda_b.* another model"):
        read_peft_whole(hostile, options)
    save_file(tensors, hostile / "adapter_model.safetensors")
    bounds = Bounds.of(world.modules, world.config.num_layers, RANK, 5000)
    with pytest.raises(AdapterInvalidError, match="at most 5000 can be held"):
        read_peft_whole(hostile, replace(options, bounds=bounds))
    about = json.loads((hostile / "adapter_config.json").read_text())
    assert about["r"] == RANK
