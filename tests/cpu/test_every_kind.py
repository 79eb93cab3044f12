"""Protects what holds for adapters of every kind alike: greedy tokens are PEFT's; evicted from both levels of
the cache while others run, adapters come back with the same answers; and on bases in 8 and 4 bits they answer
as PEFT does on the same values."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from driver import Driver, agree
from parity import KINDS, linear_names
from parity import make_kind as make_parity_kind
from running import check_greedy, let_arrive, open_decoder, tokens
from selection import extended
from test_adapter_kinds import CASES
from test_bitsandbytes import quantised
from test_peft_kinds import diagonal_settings, prompt_settings
from tiny_models import (
    make_adapter,
    make_kind,
    make_model,
    make_tuned,
    make_wide,
    reference_logits,
)

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import lora_modules
from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.model.checkpoint import read_model_config
from manylora.model.quant import EffectiveWeights
from manylora.request import LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

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


def check_quantised(model: Path, wide: Path, adapters: dict[str, Path], quant: QuantConfig | None) -> None:
    """In one batch, logits are those of transformers and PEFT on the values that the layers multiply with."""
    config = read_model_config(model)
    options = ReadOptions(
        lora_modules(config), BaseWeights(model, EffectiveWeights(config, quant)), num_layers=2
    )
    kinds = {kind: path for kind, path in adapters.items() if not kind.startswith(("virtual", "activated"))}
    decoder = open_decoder(model, max_seq_len=64, quant=quant)
    for first in range(0, len(kinds), IN_ONE_BATCH):
        part = list(kinds.items())[first : first + IN_ONE_BATCH]
        sequences = [tokens(24, seed) for seed in range(len(part))]
        loaded = [read_lora(find_source(path), 0, options) for _, path in part]
        found = Driver(decoder, sequences, loaded).run()
        for (kind, path), ids, logits in zip(part, sequences, found, strict=True):
            assert agree(logits, reference_logits(wide, path, ids)), kind


@pytest.mark.parametrize("algo", ["W4A16", *extended("FP8", "W8A16")])
def test_a_base_that_is_rounded_at_start(
    algo: str, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    quant = QuantConfig(algo)
    wide = make_wide(tmp_path / "wide", model, quant, linear_names(read_model_config(model)).linears)
    check_quantised(model, wide, adapters, quant)


def test_a_base_in_nf4(model: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    stored, wide = quantised(model, tmp_path, True)
    check_quantised(stored, wide, adapters, None)
