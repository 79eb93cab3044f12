"""Protects mixes: several adapters in one request, and scales, equal PEFT's `add_weighted_adapter` of kind
"cat", in any company, however the cache moves their members; and what cannot be mixed is refused by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from running import answers, read, run, tokens
from tiny_models import load_transformers, make_adapter, make_model, read_adapter_folder

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterCacheFullError, AdapterInvalidError, AdapterNotCachedError
from manylora.request import LoraInput, LoraMix, Request, SamplingConfig, mix

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
    [(7, 0.5), (7, 0.25), (8, 1.0)],
    [(1, 1.0)],
]


class World:
    """A tiny model, adapters of other ranks and modules, and what PEFT makes of their mixes."""

    def __init__(self, path: Path) -> None:
        picks = random.Random(5)
        self.model = make_model(path / "model", "llama", seed=2)
        self.folders, self.inputs = dict[int, Path](), dict[int, LoraInput]()
        for number in range(1, 9):
            modules = tuple(m for m in ALL if picks.random() < 0.6) or ("q_proj",)
            rank = picks.choice([1, 2, 4, 8, 16, 64])
            made = make_adapter(path / str(number), self.model, number, rank, modules)
            self.folders[number] = made
            self.inputs[number] = LoraInput(number, *read_adapter_folder(made, BaseWeights(self.model)))
        self._peft = self._load_peft()

    def lora(self, weights: Weights, *, cached: bool = False) -> LoraInput | LoraMix | None:
        return mix([(LoraInput(n) if cached else self.inputs[n], scale) for n, scale in weights])

    def request(self, weights: Weights, prompt: Sequence[int], *, cached: bool = False) -> Request:
        return Request(tuple(prompt), SamplingConfig(max_tokens=NEW), lora=self.lora(weights, cached=cached))

    def _load_peft(self):  # type: ignore[no-untyped-def]
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(load_transformers(self.model), str(self.folders[1]), "1")
        for number in range(2, 9):
            loaded.load_adapter(str(self.folders[number]), str(number))
        return loaded.eval()

    def check(self, weights: Weights, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Assert that PEFT takes these tokens. One adapter alone, and a scale of 0, are to it a mix with
        another one of scale 0."""
        named, scales = [str(number) for number, _ in weights], [scale for _, scale in weights]
        if len(set(named)) == 1:
            named, scales = [*named, "8" if named[0] != "8" else "1"], [*scales, 0.0]
        with torch.inference_mode():
            self._peft.add_weighted_adapter(named, scales, "mixed", combination_type="cat")
            self._peft.set_adapter("mixed")
            logits = self._peft(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
            self._peft.set_adapter("1")
            self._peft.delete_adapter("mixed")
        assert len(answer) == NEW
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(answer)


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
    requests = [world.request(weights, prompt) for weights, prompt in asked]
    found = answers(made, *requests)
    for (weights, prompt), answer in zip(asked, found, strict=True):
        world.check(weights, prompt, answer)
    assert len(set(map(tuple, found))) == len(found)
    assert [answers(made, request)[0] for request in requests] == found
    made.close()


def test_32_mixes_in_one_step_have_the_bits_of_each_alone(world: World) -> None:
    """Among single adapters and the base model."""
    picks = random.Random(8)
    mixed: list[Weights] = [
        [(n, picks.choice((-0.5, 0.25, 1.0))) for n in picks.sample(range(1, 9), picks.randint(2, 5))]
        for _ in range(32)
    ]
    weights = [*mixed, [(1, 1.0)], [(2, 1.0)], [(3, 0.5)], []]
    made = engine(world, max_batch_size=40, max_num_tokens=64, enable_kv_cache_reuse=False)
    params = SamplingConfig(max_tokens=NEW, return_generation_logits=True)
    requests = [
        replace(world.request(one, tokens(1 + n % 9, n)), params=params) for n, one in enumerate(weights)
    ]
    together = run(made, *requests)
    assert made.stats().max_adapters_in_step >= 32
    pairs = list(zip(requests, together, strict=True))
    for request, company in [*pairs[::7], pairs[-2]]:
        [alone] = run(made, request)
        logits = [
            np.concatenate([event.generation_logits for event in events]) for events in (alone, company)
        ]
        assert np.array_equal(*logits)
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


class Changes(torch.nn.Module):
    """A layer of PEFT that gives what its base gives, and each adapter's change of that, times a scale."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.weights = layer, dict[str, float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.layer.base_layer(x)
        total = base
        for name, scale in self.weights.items():
            if name in self.layer.lora_A:
                self.layer.set_adapter(name)
                total = total + scale * (self.layer(x) - base)
        return total


def test_mixes_with_dora_are_the_sums_of_each_change_in_peft(tmp_path: Path) -> None:
    """On a base with biases, with LoRA and DoRA of other modules; also one DoRA adapter with a scale."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    model = make_model(tmp_path / "model", "qwen2", seed=4)
    folders = {
        "1": make_adapter(tmp_path / "1", model, 1, 8, ALL, use_dora=True),
        "2": make_adapter(tmp_path / "2", model, 2, 3, ALL[:4]),
        "3": make_adapter(tmp_path / "3", model, 3, 16, ALL[2:], use_dora=True),
    }
    loaded = PeftModel.from_pretrained(load_transformers(model), str(folders["1"]), "1").eval()
    for name in ("2", "3"):
        loaded.load_adapter(str(folders[name]), name)
    layers = [(name, one) for name, one in loaded.named_modules() if isinstance(one, LoraLayer)]
    changes = [Changes(one) for _, one in layers]
    for (name, _), one in zip(layers, changes, strict=True):
        above, _, last = name.rpartition(".")
        setattr(loaded.get_submodule(above), last, one)
    cache = LoraCacheConfig(gpu_memory_bytes=2**23, host_memory_bytes=2**24)
    made = Engine(EngineConfig(model, device="cpu", dtype="float32", max_seq_len=64, lora=cache))
    base = BaseWeights(model)
    inputs = {n: LoraInput(int(n), *read_adapter_folder(path, base)) for n, path in folders.items()}
    mixes: list[dict[str, float]] = [
        {"1": 0.5, "2": -0.75, "3": 1.5},
        {"1": 1.0, "3": 1.0},
        {"3": 0.25},
        {"2": 1.0},
        {"1": 1.0},
        {"1": -1.25, "2": 2.0},
    ]
    params = SamplingConfig(max_tokens=NEW, return_generation_logits=True)
    requests = [
        Request(tuple(tokens(5 + 9 * n, n)), params, lora=mix([(inputs[m], s) for m, s in weights.items()]))
        for n, weights in enumerate(mixes)
    ]
    for weights, request, events in zip(mixes, requests, run(made, *requests), strict=True):
        answer = [token for event in events for token in event.token_ids]
        for one in changes:
            one.weights = weights
        with torch.inference_mode():
            ids = torch.tensor([[*request.prompt, *answer]])
            logits = loaded(input_ids=ids).logits[0, len(request.prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
        got = np.concatenate(
            [event.generation_logits for event in events if event.generation_logits is not None]
        )
        np.testing.assert_allclose(got.reshape(logits.shape), logits.numpy(), rtol=2e-4, atol=2e-4)
    made.check()
    made.close()
