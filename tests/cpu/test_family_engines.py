"""Protects the engine on families that differ in what it touches: names, fused rows, windows, sizes of heads,
positions, chunks, latents, states and experts. Tokens are those of transformers + PEFT for the base and its
adapters in one step, in parts, with their blocks known, alone, after preemption, and as beams. And what holds
for adapters of every kind alike: evicted from both levels of the cache while others run, they come back with
the same answers; and on rounded bases they answer as PEFT does on the same values.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, agree, decoder_of
from parity import KINDS, linear_names
from parity import make_kind as make_parity_kind
from running import (
    ServedModel,
    answers,
    check_beams,
    check_greedy,
    let_arrive,
    request_of,
    tokens,
)
from selection import extended
from test_adapter_kinds import CASES
from test_moe import EXPERTS, in_block
from test_peft_kinds import diagonal_settings, prompt_settings
from tiny_models import make_adapter, make_kind, make_model, make_tuned, make_wide, reference_logits

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import lora_modules
from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.engine.engine import Engine
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import Device
from manylora.model.checkpoint import read_model_config
from manylora.model.quant import EffectiveWeights
from manylora.request import LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = (
    "falcon-new", "gemma3", "gpt-neox", "gpt2", "olmo2", "phi3", "gemma3n", "cohere2", "ministral3", "opt",
    "opt-350m", "gpt-oss", "gemma4", "gemma4-moe", "gemma4-shared", "llama4", "llama4-interleaved",
    "deepseek-v2-lite", "deepseek-v3", "glm4-moe", "qwen3-next-dense", "qwen3.5", "qwen3-next",
    "qwen3.5-moe", "lfm2", "granite4", "granite4-moe", "nemotron-h", "nemotron-h-moe",
    "nemotron-h-moe-latent", "falcon-h1",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "llama4": {"tokens_per_block": 12},  # chunks end within a block
    "qwen3.5": {"enable_overlap": True},
}
PLAIN = ("gate_proj", "up_proj", "down_proj")
OF_QWEN = (*(f"shared_expert.{name}" for name in PLAIN), "shared_expert_gate")
SHARED_EXPERTS = {
    "qwen3-next": OF_QWEN, "qwen3.5-moe": OF_QWEN, "llama4": ("shared_expert.up_proj",),
    "granite4-moe": ("shared_mlp.input_linear", "shared_mlp.output_linear"),
    "nemotron-h-moe": ("shared_experts.up_proj", "shared_experts.down_proj"),
    "nemotron-h-moe-latent": ("shared_experts.up_proj", "fc1_latent_proj", "fc2_latent_proj"),
}  # fmt: skip
COUNT = 8  # tokens of an answer
request = partial(request_of, count=COUNT)


class Served(ServedModel):
    """A model, and two adapters on all of its linear layers, made once."""

    def __init__(self, folder: Path, family: str, count: int = COUNT) -> None:
        super().__init__(folder / "model", folder / "prefetch", count)
        self.adapters += self.prefetch / "1", self.prefetch / "2"
        if folder.exists():
            return
        config = read_model_config(make_model(self.model, family, seed=5))
        modules = {"modules": linear_names(config).linears, **experts_of(config, family)}
        make_adapter(self.prefetch / "1", self.model, 1, rank=4, **modules)
        make_adapter(self.prefetch / "2", self.model, 2, rank=7, use_dora=config.moe is None, **modules)


def experts_of(config: ModelConfig, family: str) -> dict[str, Any]:
    if config.moe is None:
        return {}
    linears = [name for name in linear_names(config).linears if name not in PLAIN]
    shared = SHARED_EXPERTS.get(family, ())
    return {"modules": (*linears, *shared), **in_block({"target_parameters": EXPERTS}, family)}


@pytest.fixture
def served(workshop: Path) -> Any:
    return lambda family: Served(workshop / family, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch(family: str, served: Any) -> None:
    """Prompts of unequal lengths, some in parts of 16 and 32 tokens; again, from the cache; and alone."""
    model = served(family)
    engine = model.engine(max_num_tokens=40, **SETTINGS.get(family, {}))
    wanted = [(tokens(length, length), number % 3) for number, length in enumerate((21, 60, 33, 5, 48, 1))]
    found = answers(engine, *(request(*one) for one in wanted))
    model.check(found, wanted)
    assert answers(engine, *(request(*one) for one in wanted)) == found
    assert engine.stats().kv_tokens_reused
    assert [answers(engine, request(*one))[0] for one in wanted[:3]] == found[:3]
    engine.close()


@pytest.mark.parametrize("family", ["qwen3.5", "granite4", "gemma3n", "gemma4-shared", "deepseek-v3"])
def test_preempted_sequences_go_on_as_before(family: str, served: Any) -> None:
    model = served(family)
    engine = model.engine(batch_scheduler_policy="max_utilization", max_tokens_in_paged_kv_cache=96)
    wanted = [(tokens(26, seed), seed % 3) for seed in range(5)]
    found = answers(engine, *(request(*one) for one in wanted))
    assert engine.stats().preemptions
    engine.close()
    model.check(found, wanted)


@pytest.mark.parametrize(
    "family", ["deepseek-v3", "llama4", "gpt-oss", "gemma4", "qwen3.5", *extended("gemma4-moe", "granite4")]
)
def test_beams(family: str, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served(family)
    engine = model.engine(max_beam_width=3, **SETTINGS.get(family, {}))
    check_beams(engine, request(tokens(50, 1), 1), model.model, model.adapters[1], monkeypatch)
    engine.close()


@pytest.mark.parametrize("family", ["deepseek-v3", *extended("gemma3n")])
def test_the_path_of_a_gpu(family: str, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels, or their interpreter; nothing is recorded."""
    device = Device(torch.device("cpu"), CudaOps(), "interpreted", None)
    monkeypatch.setattr("manylora.engine.build.open_device", lambda name: device)
    model = served(family)
    engine = model.engine(max_batch_size=2, max_seq_len=32, enable_cuda_graph=False)
    wanted = [(tokens(12 - number, number), number) for number in (0, 1)]
    found = answers(engine, *(request(*one, count=2) for one in wanted))
    engine.close()
    assert found == [model.expected(*one)[:2] for one in wanted]


INVOCATION = [7, 9]
IN_ONE_BATCH = 16
FEW = (
    "adalora", "deft", "gralora", "loha", "lokr", "miss", "peanut", "pissa", "tinylora", "unilora",
    "vblora", "vera",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("every") / "model", "llama-biases", seed=3)


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    """By kind; the folders' names are task ids."""
    root, made = model.parent / "adapters", dict[str, Path]()

    def place() -> Path:
        return root / str(len(made))

    for kind in KINDS:
        made[kind] = make_parity_kind(place(), model, kind, len(made))
    for kind in FEW:
        settings, strength = CASES[kind]
        made[kind] = make_kind(place(), model, settings(), len(made), strength)
    for settings in diagonal_settings(model):
        name = f"{settings.peft_type.value} {len(made)}"
        made[name] = make_tuned(place(), model, settings, len(made))
    for folder in prompt_settings(model.parent / "prompts", model):
        target = place()
        shutil.copytree(folder, target)
        made[f"virtual tokens {folder.name}"] = target
    more = {"alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM"}
    made["activated"] = make_adapter(place(), model, 5, 4, **more)
    return made


def test_evicted_while_others_run_each_comes_back_with_the_same_answers(
    model: Path, adapters: dict[str, Path]
) -> None:
    rank = 16**2
    sizes = {"gpu_memory_bytes": 2**26, "host_memory_bytes": 2**26, "max_adapter_size": rank}
    cache = LoraCacheConfig(prefetch_dir=model.parent / "adapters", **sizes)
    engine = Engine(
        EngineConfig(
            model, device="cpu", max_seq_len=256, max_num_tokens=256, max_batch_size=64, lora=cache,
            enable_kv_cache_reuse=False,
        )
    )  # fmt: skip
    prompt = (*tokens(12, 1), *INVOCATION, *tokens(5, 2))
    neighbours = [None, LoraInput(0), LoraInput(len(KINDS))]
    found: dict[int, list[int]] = {}

    def submit(lora: LoraInput | None, length: int) -> int:
        handle = engine.submit(engine.prepare(Request(prompt, SamplingConfig(length), lora, streaming=True)))
        found[handle] = []
        return handle

    def step() -> None:
        for handle, event in engine.step():
            assert event.error is None
            found[handle] += event.token_ids

    def ask() -> list[list[int]]:
        """Beside the neighbours, which go on."""
        handles = [submit(LoraInput(task_id), 6) for task_id in range(len(adapters))]
        let_arrive(engine)
        while any(len(found[handle]) < 6 for handle in handles):
            step()
        return [found[handle] for handle in handles]

    running = [submit(lora, 220) for lora in neighbours]
    step()
    first, stats = ask(), engine.adapters.stats()
    assert stats.host_evictions == 0
    for path, answer in zip(adapters.values(), first, strict=True):
        if path != adapters["activated"]:  # which PEFT looks for in what was generated too
            check_greedy(answer, 6, model, path, prompt)
    held = {engine.adapters.library.digest(lora.task_id) for lora in neighbours if lora and lora.task_id}
    held.add(engine.adapters.library.digest(0))
    dropped = 0
    for task_id in range(len(adapters)):
        digest = engine.adapters.library.digest(task_id)
        assert digest is not None
        if digest not in held:
            engine.adapters.drop(digest)
            assert not engine.adapters.resident(task_id)
            dropped += 1
    assert dropped == len(adapters) - 2
    loads = engine.adapters.stats().source_loads
    for kind, before, after in zip(adapters, first, ask(), strict=True):
        assert before == after, kind
    assert engine.adapters.stats().source_loads >= loads + dropped
    lengths = [len(found[handle]) for handle in running]
    assert all(0 < length < 220 for length in lengths), f"the neighbours have not run all along: {lengths}"
    while engine.has_work:
        step()
    disturbed = [found[handle] for handle in running]
    for lora, before in zip(neighbours, disturbed, strict=True):
        alone = submit(lora, 220)
        while engine.has_work:
            step()
        assert found[alone] == before
    engine.check()
    engine.close()


@pytest.mark.parametrize("algo", ["W4A16", *extended("FP8", "W8A16")])
def test_a_base_that_is_rounded_at_start(
    algo: str, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """In one batch, logits are those of transformers and PEFT on the values that the layers multiply with."""
    quant, config = QuantConfig(algo), read_model_config(model)
    wide = make_wide(tmp_path / "wide", model, quant, linear_names(config).linears)
    base = BaseWeights(model, EffectiveWeights(config, quant))
    options = ReadOptions(lora_modules(config), base, num_layers=2)
    kinds = {kind: path for kind, path in adapters.items() if not kind.startswith(("virtual", "activated"))}
    decoder = decoder_of(model, max_seq_len=64, quant=quant)
    for first in range(0, len(kinds), IN_ONE_BATCH):
        part = list(kinds.items())[first : first + IN_ONE_BATCH]
        sequences = [tokens(24, seed) for seed in range(len(part))]
        loaded = [read_lora(find_source(path), 0, options) for _, path in part]
        found = Driver(decoder, sequences, loaded).run()
        for (kind, path), ids, logits in zip(part, sequences, found, strict=True):
            assert agree(logits, reference_logits(wide, path, ids)), kind
