"""Protects mixes: several adapters in one request, and scales, are the sums of each one's change in PEFT, in
any company, however the cache moves their members; and what cannot be mixed is refused by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import answers, read, run, tokens, tokens_of
from tiny_models import load_transformers, make_adapter, make_model, read_adapter_folder

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterCacheFullError, AdapterInvalidError, AdapterNotCachedError
from manylora.request import Event, LoraInput, Request, SamplingConfig, mix

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEW = 8
Weights = Sequence[tuple[int, float]]  # (task id, scale)
MIXES: list[Weights] = [
    [(1, 1.0), (2, 1.0)],
    [(1, 0.5), (2, -0.75), (3, 1.5)],
    [(number, 0.4 + number / 10) for number in range(1, 9)],
    [(4, -1.0)],
    [(5, 0.3)],
    [(2, 0.0), (6, 2.0)],
    [(3, 0.0)],
    [(3, 0.25)],
    [(1, -1.25), (3, 2.0)],
    [(7, 0.5), (7, 0.25), (8, 1.0)],
    [(1, 1.0)],
]


class Changes(torch.nn.Module):
    """A layer of PEFT that gives what its base gives, and each adapter's change of that, times a scale."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.weights = layer, list[tuple[str, float]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.layer.base_layer(x)
        total = base
        for name, scale in self.weights:
            if name in self.layer.lora_A:
                self.layer.set_adapter(name)
                total = total + scale * (self.layer(x) - base)
        return total


class World:
    """A tiny model with biases, adapters of other ranks and modules, two of them with DoRA, and what PEFT
    makes of their mixes."""

    def __init__(self, path: Path) -> None:
        picks = random.Random(5)
        self.model = make_model(path / "model", "qwen2", seed=2)
        self.folders, self.inputs = dict[int, Path](), dict[int, LoraInput]()
        for number in range(1, 9):
            modules = tuple(m for m in ALL if picks.random() < 0.6) or ("q_proj",)
            rank, dora = picks.choice([1, 2, 4, 8, 16, 64]), number in (1, 3)
            made = make_adapter(path / str(number), self.model, number, rank, modules, use_dora=dora)
            self.folders[number] = made
            self.inputs[number] = LoraInput(number, *read_adapter_folder(made, BaseWeights(self.model)))
        self._peft, self._changes = self._load_peft()

    def request(self, weights: Weights, prompt: Sequence[int], **options: Any) -> Request:
        lora = mix([(self.inputs[n], scale) for n, scale in weights])
        return Request(tuple(prompt), SamplingConfig(max_tokens=NEW, **options), lora=lora)

    def _load_peft(self):  # type: ignore[no-untyped-def]
        from peft import PeftModel
        from peft.tuners.lora import LoraLayer

        loaded = PeftModel.from_pretrained(load_transformers(self.model), str(self.folders[1]), "1").eval()
        for number in range(2, 9):
            loaded.load_adapter(str(self.folders[number]), str(number))
        layers = [(name, one) for name, one in loaded.named_modules() if isinstance(one, LoraLayer)]
        changes = [Changes(one) for _, one in layers]
        for (name, _), one in zip(layers, changes, strict=True):
            above, _, last = name.rpartition(".")
            setattr(loaded.get_submodule(above), last, one)
        return loaded, changes

    def check(self, weights: Weights, prompt: Sequence[int], events: Sequence[Event]) -> None:
        """Assert that PEFT computes these logits, and takes these tokens."""
        for one in self._changes:
            one.weights = [(str(number), scale) for number, scale in weights]
        answer = tokens_of(events)
        with torch.inference_mode():
            logits = self._peft(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        assert len(answer) == NEW and logits.argmax(-1).tolist() == answer
        got = logits_of(events).reshape(logits.shape)
        np.testing.assert_allclose(got, logits.numpy(), rtol=2e-4, atol=2e-4)


def logits_of(events: Sequence[Event]) -> np.ndarray:
    return np.concatenate([one.generation_logits for one in events if one.generation_logits is not None])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def engine(world: World, **options: object) -> Engine:
    lora = {"gpu_memory_bytes": 2**23, "host_memory_bytes": 2**24, **options.pop("lora", {})}  # type: ignore[dict-item]
    settings = {"device": "cpu", "dtype": "float32", "max_seq_len": 128, "tokens_per_block": 4, **options}
    return Engine(EngineConfig(world.model, lora=LoraCacheConfig(**lora), **settings))  # type: ignore[arg-type]


def test_mixes_equal_peft_together_and_alone(world: World) -> None:
    made = engine(world)
    prompts = [tokens(length, length) for length in (3, 17, 40)]
    asked = [(weights, prompts[n % 3]) for n, weights in enumerate(MIXES)]
    requests = [world.request(*one, return_generation_logits=True) for one in asked]
    found = run(made, *requests)
    for (weights, prompt), events in zip(asked, found, strict=True):
        world.check(weights, prompt, events)
    together = [tokens_of(events) for events in found]
    assert len(set(map(tuple, together))) == len(found)
    assert [answers(made, request)[0] for request in requests] == together
    made.close()


def test_members_are_evicted_and_come_back(world: World) -> None:
    """Pages for the largest mix alone: everything else goes for it, and all of it or nothing is pinned."""
    asked = [MIXES[n] for n in (2, 1, 7, 2, 0, 4, 2)]
    plenty, prompt = engine(world), tokens(9)
    expected = answers(plenty, *[world.request(weights, prompt) for weights in asked])
    adapters = [world.inputs[n] for n in range(1, 9)]
    leases = [plenty.adapters.acquire(one, plenty.adapters.prepare(one)) for one in adapters]
    size = plenty.adapters.stats().page_bytes * sum(lease.layout.num_pages for lease in leases)
    plenty.close()
    made = engine(world, lora={"gpu_memory_bytes": size, "host_memory_bytes": size})
    assert answers(made, *[world.request(weights, prompt) for weights in asked]) == expected
    assert not made.adapters.stats().device_pinned
    made.close()


def test_what_does_not_fit_or_cannot_be_mixed_is_refused_by_name(world: World, tmp_path: Path) -> None:
    made = engine(world, lora={"gpu_memory_bytes": 2**19, "host_memory_bytes": 2**19})
    large = [make_adapter(tmp_path / str(n), world.model, n, 32, ALL) for n in range(2)]
    members = [(read(path, world.model, n), 1.0) for n, path in enumerate(large)]
    with pytest.raises(
        AdapterCacheFullError, match=r"0, 1 together: they need \d \+ \d pages, the host level"
    ):
        run(made, Request((1,), lora=mix(members)))
    made.close()
    made = engine(world)
    kinds = {"head": {"modules_to_save": ["lm_head"]}, "embed": {"modules_to_save": ["embed_tokens"]}}
    for number, (what, options) in enumerate(kinds.items(), 20):
        made_at = make_adapter(tmp_path / what, world.model, 3, 4, ALL[:3], **options)
        lora = read(made_at, world.model, number)
        [[*_, last]] = run(made, Request((1, 2), SamplingConfig(max_tokens=2), lora=lora))
        assert last.error is None
        for members in ([(lora, 0.5)], [(world.inputs[1], 1.0), (lora, 1.0)]):
            with pytest.raises(AdapterInvalidError, match=f"of task {number} .*{what}.* cannot be mixed"):
                run(made, Request((1, 2), SamplingConfig(max_tokens=2), lora=mix(members)))
    with pytest.raises(AdapterNotCachedError, match="LoRA task 77 not found in cache"):
        run(made, Request((1,), lora=mix([(world.inputs[1], 1.0), (LoraInput(77), 1.0)])))
    made.check()
    made.close()


def test_the_cache_of_keys_and_values_knows_mixes_and_scales(world: World) -> None:
    made, prompt = engine(world), tokens(40)
    asked: list[Weights] = [[(1, 1.0)], [(1, 0.5)], [(1, 1.0), (2, 1.0)], [(1, 1.0), (2, 0.5)], []]
    for weights in asked:
        [[*_, last]] = run(made, world.request(weights, prompt))
        assert last.metrics is not None and last.metrics.kv_reused_blocks == 0
    same: list[Weights] = [[(1, 1.0), (2, 0.0)], [(1, 0.25), (1, 0.25)], [(2, 1.0), (1, 1.0)], [(5, 0.0)]]
    for weights in same:
        [[*_, last]] = run(made, world.request(weights, prompt))
        assert last.metrics is not None and last.metrics.kv_reused_blocks > 0
    made.close()
