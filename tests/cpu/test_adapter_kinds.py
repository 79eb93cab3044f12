"""Protects that adapters of every kind of PEFT's that is served answer as they do there, in one batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from manylora.kernels.device import open_device
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import lora_modules
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder
from manylora.testing.driver import Driver, agree
from manylora.testing.tiny_models import make_kind, make_model, reference_logits

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
PATTERN = {"rank_pattern": {"down_proj": 2, "layers.1.self_attn.v_proj": 6}}
# Name of a case -> PEFT's settings of it, and the strength of its random values.
CASES: dict[str, tuple[Callable[[], Any], float]] = {
    "adalora": (
        lambda: peft.AdaLoraConfig(init_r=6, target_r=3, total_step=10, lora_alpha=9, target_modules=ALL),
        0.5,
    ),
    "delora": (lambda: peft.DeloraConfig(r=5, target_modules=ALL, **PATTERN), 0.4),
    "loha": (lambda: peft.LoHaConfig(r=3, alpha=5, target_modules=ALL), 0.4),
    "loha of full rank": (lambda: peft.LoHaConfig(r=12, alpha=5, target_modules=ATTENTION, **PATTERN), 0.3),
    "lokr": (lambda: peft.LoKrConfig(r=2, alpha=3, target_modules=ALL), 0.5),
    "lokr, both split": (
        lambda: peft.LoKrConfig(r=2, alpha=4, decompose_both=True, decompose_factor=4, target_modules=ALL),
        0.7,
    ),
    "lokr, neither split": (lambda: peft.LoKrConfig(r=60, alpha=60, target_modules=ATTENTION), 0.1),
    "miss": (lambda: peft.MissConfig(r=6, target_modules=ALL), 0.2),
    "miss, some layers": (
        lambda: peft.MissConfig(
            r=8, target_modules=ATTENTION, layers_to_transform=[1], layers_pattern="layers"
        ),
        0.4,
    ),
    "miss, mini": (
        lambda: peft.MissConfig(r=8, mini_r=4, init_weights="mini", target_modules=ATTENTION),
        0.3,
    ),
    "vblora": (
        lambda: peft.VBLoRAConfig(r=4, num_vectors=9, vector_length=16, topk=3, target_modules=ALL),
        0.8,
    ),
    "vblora, top weights": (
        lambda: peft.VBLoRAConfig(
            r=3, num_vectors=12, vector_length=8, topk=2, save_only_topk_weights=True, target_modules=ALL
        ),
        0.8,
    ),
    "vera": (lambda: peft.VeraConfig(r=7, target_modules=ALL), 1.5),
    "vera, drawn": (
        lambda: peft.VeraConfig(r=5, save_projection=False, projection_prng_key=77, target_modules=ATTENTION),
        1.5,
    ),
}
# The same of LoRA's variants, whose random values are added to what training starts with.
LORAS: dict[str, dict[str, Any]] = {
    "bdlora": {
        "use_bdlora": peft.tuners.lora.BdLoraConfig(
            ["o_proj", "down_proj"], ["q_proj", "up_proj"], nblocks=2
        ),
        "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"],
    },
    "monteclora": {"monteclora_config": peft.MontecloraConfig(num_samples=2, buffer_size=1)},
    "velora": {"velora_config": {"num_groups": 4, "init_type": "random"}},
    "pissa": {"init_lora_weights": "pissa", "use_rslora": True},
    "olora": {"init_lora_weights": "olora"},
    "kasa": {"kasa_config": peft.tuners.lora.KasaConfig()},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}
for _name, _options in LORAS.items():
    CASES[_name] = (partial(peft.LoraConfig, r=4, lora_alpha=6, **{"target_modules": ALL, **_options}), 0.2)
IDS = [random.Random(3).randrange(3, 250) for _ in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("kinds") / "model", "llama", seed=4)


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    made = {}
    for seed, (name, (config, strength)) in enumerate(CASES.items()):
        made[name] = make_kind(model.parent / name.replace(" ", "_"), model, config(), seed, strength)
    return made


@pytest.fixture(scope="module")
def options(model: Path) -> ReadOptions:
    return ReadOptions(lora_modules(read_model_config(model)), BaseWeights(model))


@pytest.fixture(scope="module")
def logits(model: Path, adapters: dict[str, Path], options: ReadOptions) -> dict[str, torch.Tensor]:
    """Ours, of all adapters in one batch."""
    decoder = load_decoder(model, read_model_config(model), torch.float32, open_device("cpu"))
    loaded = [read_lora(find_source(path), 0, options) for path in adapters.values()]
    found = Driver(decoder, [IDS] * len(loaded), loaded).run()
    return dict(zip(adapters, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_each_kind_answers_as_peft_does(
    name: str, model: Path, adapters: dict[str, Path], logits: dict[str, torch.Tensor]
) -> None:
    expected = reference_logits(model, adapters[name], IDS)
    assert agree(logits[name], expected)
    plain = reference_logits(model, None, IDS)
    assert not agree(expected, plain), "the adapter changes nothing"
