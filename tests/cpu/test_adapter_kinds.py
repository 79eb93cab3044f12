"""Protects that adapters of every kind of PEFT's that is served answer as they do there, in one batch."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_cases import WEIGHTS, edited
from driver import Driver, agree, decoder_of
from safetensors.torch import load_file
from tiny_models import load_transformers, make_kind, make_model, reference_logits

from manylora.adapters.bounds import Bounds
from manylora.adapters.catalog.reader import AdapterReader
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.peft_types import READERS, REASONS, check_peft_type
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora, read_whole
from manylora.adapters.modules import lora_modules
from manylora.adapters.report import BaseModel, inspect_adapter
from manylora.adapters.rules import AdapterRules, has_effect
from manylora.config.engine import LoraCacheConfig
from manylora.doors.cli.convert import main as convert
from manylora.errors import AdapterInvalidError
from manylora.model.checkpoint import read_model_config

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
PATTERN = {"rank_pattern": {"down_proj": 2, "layers.1.self_attn.v_proj": 6}}


def kind(config: Callable[..., Any], strength: float, **settings: Any) -> tuple[Callable[[], Any], float]:
    """PEFT's settings of a case, and the strength of its random values."""
    return partial(config, **{"target_modules": ALL, **settings}), strength


# By the name of a case.
CASES = {
    "adalora": kind(peft.AdaLoraConfig, 0.5, init_r=6, target_r=3, total_step=10, lora_alpha=9),
    "deft": kind(peft.DeftConfig, 0.3, r=4),
    "deft, orthogonal": kind(peft.DeftConfig, 0.3, r=4, alpha=6, decomposition_method="qr"),
    "deft, para": kind(peft.DeftConfig, 0.2, r=3, para=True),
    "delora": kind(peft.DeloraConfig, 0.4, r=5, **PATTERN),
    "gralora": kind(peft.GraloraConfig, 0.3, r=4, gralora_k=2, alpha=6),
    "gralora, hybrid": kind(peft.GraloraConfig, 0.3, r=8, gralora_k=4, hybrid_r=3, alpha=6),
    "loha": kind(peft.LoHaConfig, 0.4, r=3, alpha=5),
    "loha of full rank": kind(peft.LoHaConfig, 0.3, r=12, alpha=5, target_modules=ATTENTION, **PATTERN),
    "lokr": kind(peft.LoKrConfig, 0.5, r=2, alpha=3),
    "lokr, both split": kind(peft.LoKrConfig, 0.7, r=2, alpha=4, decompose_both=True, decompose_factor=4),
    "lokr, neither split": kind(peft.LoKrConfig, 0.1, r=60, alpha=60, target_modules=ATTENTION),
    "miss": kind(peft.MissConfig, 0.2, r=6),
    "miss, some layers": kind(
        peft.MissConfig, 0.4, r=8, target_modules=ATTENTION, layers_to_transform=[1], layers_pattern="layers"
    ),
    "miss, mini": kind(peft.MissConfig, 0.3, r=8, mini_r=4, init_weights="mini", target_modules=ATTENTION),
    "peanut": kind(peft.PeanutConfig, 0.3, r=4),
    "peanut, deep": kind(peft.PeanutConfig, 0.5, r=4, depth=2, act_fn="silu", scaling=0.5),
    "vblora": kind(peft.VBLoRAConfig, 0.8, r=4, num_vectors=9, vector_length=16, topk=3),
    "vblora, top weights": kind(
        peft.VBLoRAConfig, 0.8, r=3, num_vectors=12, vector_length=8, topk=2, save_only_topk_weights=True
    ),
    "tinylora": kind(peft.TinyLoraConfig, 0.6, r=3, u=5),
    "tinylora, tied": kind(
        peft.TinyLoraConfig, 0.9, r=2, u=4, weight_tying=0.7, save_projection=False, projection_seed=5
    ),
    "unilora": kind(peft.UniLoraConfig, 2, r=3, theta_d_length=40, save_indices=True),
    "unilora, drawn": kind(peft.UniLoraConfig, 2, r=5, theta_d_length=33, proj_seed=8),
    "pvera": kind(peft.PveraConfig, 1.5, r=7),
    "pvera, drawn": kind(peft.PveraConfig, 1.5, r=4, save_projection=False, target_modules=ATTENTION),
    "vera": kind(peft.VeraConfig, 1.5, r=7),
    "vera, drawn": kind(
        peft.VeraConfig, 1.5, r=5, save_projection=False, projection_prng_key=77, target_modules=ATTENTION
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
    "pissa of more than a weight": {"init_lora_weights": "pissa", "use_rslora": True, "r": 40},
    "pissa and dora": {"init_lora_weights": "pissa", "use_dora": True},
    "olora of more than a weight": {"init_lora_weights": "olora", "r": 40},
    "olora and dora": {"init_lora_weights": "olora", "use_dora": True},
    "kasa": {"kasa_config": peft.tuners.lora.KasaConfig()},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}
CASES |= {
    name: kind(peft.LoraConfig, 0.2, **{"r": 4, "lora_alpha": 6, **settings})
    for name, settings in LORAS.items()
}
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
    decoder = decoder_of(model)
    told: list[str] = []
    options = replace(options, num_layers=2, tell=told.append)
    loaded = [read_lora(find_source(path), 0, options) for path in adapters.values()]
    assert not told, "PEFT's own settings are known"
    found = Driver(decoder, [IDS] * len(loaded), loaded).run()
    return dict(zip(adapters, found, strict=True))


def test_every_kind_of_peft_is_served_or_refused_by_its_name() -> None:
    assert not READERS.keys() & REASONS.keys()
    for kind in peft.PeftType:
        assert kind.value in READERS or kind.value in REASONS, "a kind without a reason"
        try:
            assert check_peft_type({"peft_type": kind.value.lower()}) == kind.value
        except AdapterInvalidError as error:
            assert f"sets peft_type {kind.value}: {REASONS[kind.value]}; served are" in str(error)


@pytest.mark.parametrize("name", CASES)
def test_each_kind_answers_as_peft_does(
    name: str, model: Path, adapters: dict[str, Path], logits: dict[str, torch.Tensor]
) -> None:
    expected = reference_logits(model, adapters[name], IDS)
    assert agree(logits[name], expected)
    plain = reference_logits(model, None, IDS)
    assert not agree(expected, plain), "the adapter changes nothing"


# Families that keep weights the other way round, or several in one, with kinds that depend on it.
TURNED: dict[str, Any] = {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}
FUSED = {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}
OTHER_FAMILIES = {
    "gpt2": {
        "vera": kind(peft.VeraConfig, 1.5, r=5, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
        "gralora": kind(peft.GraloraConfig, 0.3, r=4, **TURNED),
        "pissa": kind(peft.LoraConfig, 0.2, r=3, init_lora_weights="pissa", **TURNED),
    },
    "phi3": {
        "deft": kind(peft.DeftConfig, 0.3, r=4, **FUSED),
        "gralora": kind(peft.GraloraConfig, 0.3, r=4, **FUSED),
        "peanut": kind(peft.PeanutConfig, 0.3, r=4, **FUSED),
        "miss": kind(peft.MissConfig, 0.3, r=6, **FUSED),
        "loha": kind(peft.LoHaConfig, 0.4, r=2, alpha=4, target_modules=["qkv_proj", "gate_up_proj"]),
        "tinylora": kind(peft.TinyLoraConfig, 0.6, r=3, u=4, **FUSED),
    },
}


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_kinds_on_other_families(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family, seed=2)
    config = read_model_config(model)
    options = ReadOptions(lora_modules(config), BaseWeights(model))
    made = [
        make_kind(tmp_path / name, model, settings(), 1, strength)
        for name, (settings, strength) in OTHER_FAMILIES[family].items()
    ]
    decoder = decoder_of(model)
    loaded = [read_lora(find_source(path), 0, options) for path in made]
    for path, found in zip(made, Driver(decoder, [IDS] * len(made), loaded).run(), strict=True):
        assert agree(found, reference_logits(model, path, IDS)), path.name


# Of these nothing in the file says r: it was pruned, it only scales, or the numbers are drawn by it.
WITHOUT_RANK = ("adalora", "lokr, neither split", "unilora, drawn")


def test_a_rank_that_contradicts_the_tensors_is_refused(
    adapters: dict[str, Path], options: ReadOptions, tmp_path: Path
) -> None:
    for name in CASES.keys() - {*WITHOUT_RANK}:
        told = json.loads((adapters[name] / "adapter_config.json").read_text())["r"]
        folder = edited(adapters[name], tmp_path / name.replace(" ", "_"), r=told + 1)
        with pytest.raises(
            AdapterInvalidError, match=rf"has rank \d+, and adapter_config.json says {told + 1}"
        ):
            read_whole(find_source(folder), options)


@pytest.mark.parametrize(("name", "part"), [("delora", "delora_lambda"), ("deft", "deft_R")])
def test_tensors_that_do_not_fit_together_are_refused_as_such(
    adapters: dict[str, Path], options: ReadOptions, tmp_path: Path, name: str, part: str
) -> None:
    tensors = load_file(adapters[name] / WEIGHTS)
    key = next(key for key in tensors if key.endswith(part))
    longer = torch.cat((tensors[key], tensors[key][:1]))
    folder = edited(adapters[name], tmp_path / "edited", {key: longer})
    with pytest.raises(AdapterInvalidError, match="its tensors do not fit together"):
        read_whole(find_source(folder), options)


def test_the_ranks_of_a_pruned_adalora_are_those_of_its_settings(
    adapters: dict[str, Path], options: ReadOptions, tmp_path: Path
) -> None:
    """PEFT writes which of the first ranks were kept."""
    tensors = load_file(adapters["adalora"] / "adapter_model.safetensors")
    paths = [key for key in tensors if key.endswith("lora_A")]
    kept = {f"{path.removeprefix('base_model.model.')[:-1]}E": [True] * 6 for path in paths}
    read_whole(find_source(edited(adapters["adalora"], tmp_path / "kept", rank_pattern=kept)), options)
    fewer = {key: [True, False] for key in kept}
    with pytest.raises(AdapterInvalidError, match=r"has rank 6, and .* says 1"):
        read_whole(find_source(edited(adapters["adalora"], tmp_path / "fewer", rank_pattern=fewer)), options)


def test_variants_that_are_not_served_together_are_refused(
    adapters: dict[str, Path], options: ReadOptions, tmp_path: Path
) -> None:
    for number, more in enumerate(({"init_lora_weights": "pissa"}, {"use_dora": True})):
        folder = edited(adapters["kasa"], tmp_path / str(number), **more)
        with pytest.raises(
            AdapterInvalidError, match="several variants of LORA that are not served together"
        ):
            read_whole(find_source(folder), options)


def test_a_converted_kind_answers_the_same(
    model: Path, adapters: dict[str, Path], logits: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """As the plain tensors of `manylora convert`, which reads each kind as the servers do."""
    names = ("loha", "miss", "pissa", "vera, drawn")
    folders = [tmp_path / name for name in names]
    for name, folder in zip(names, folders, strict=True):
        arguments = ["-i", str(adapters[name]), "-o", str(folder), "--to", "npy"]
        assert convert([*arguments, "--base", str(model)]) == 0
    decoder = decoder_of(model)
    loaded = [read_lora(find_source(folder), 0) for folder in folders]
    for name, found in zip(names, Driver(decoder, [IDS] * len(loaded), loaded).run(), strict=True):
        assert torch.equal(found, logits[name])


@pytest.mark.parametrize(
    ("factors", "settings", "told"),
    [
        ({}, {}, None),
        ({r"layers\.1\.": None}, {}, "layers 0 to 0 of 2: it was trained on a base of fewer layers"),
        ({r"layers\.1\.self_attn\.q_proj": None}, {}, "does not have: q_proj of layer 1"),
        ({"up_proj": None}, {}, "does not have: up_proj"),
        ({}, {"target_modules": ["q_proj", "mlp.up_proj"]}, "leaves out what the file has"),
        ({}, {"exclude_modules": ["v_proj"]}, "layers.0.self_attn.v_proj, base_model.model.model.layers.1"),
        ({}, {"layers_to_transform": [0]}, "leaves out what the file has"),
        ({"lora_B": 0.0}, {}, "it changes nothing"),
        ({}, {"later": 3}, "sets later, which nobody here knows"),
        ({}, {"later": None, "use_later": False, "later_config": {}}, None),
    ],
)
def test_what_may_not_have_been_meant_is_told(
    model: Path,
    adapters: dict[str, Path],
    options: ReadOptions,
    tmp_path: Path,
    factors: dict[str, float | None],
    settings: dict[str, Any],
    told: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """factors: of tensors with such names; None: they are left out."""
    found = load_file(adapters["orthogonal"] / WEIGHTS)
    tensors = {
        key: None if factor is None else factor * found[key]
        for name, factor in factors.items()
        for key in found
        if re.search(name, key)
    }
    adapter = edited(adapters["orthogonal"], tmp_path / "edited", tensors, **settings)
    config = read_model_config(model)
    report = inspect_adapter(adapter, BaseModel(model, config, LoraCacheConfig()))
    assert report.problem is None
    rules = AdapterRules(lora_modules(config), config.num_layers, 64)
    bounds = Bounds.of(rules.modules, config.num_layers, 64)
    read = AdapterReader(rules, replace(options, bounds=bounds)).read(adapter)
    assert report.notes == read.facts.notes
    assert [note for note in report.notes if told and told in note] or (told is None and not report.notes)
    assert told is None or told in caplog.text


def test_an_untrained_adapter_of_any_kind_is_told(
    model: Path, adapters: dict[str, Path], options: ReadOptions, tmp_path: Path
) -> None:
    """Its matrices are not zero, its product is: of PiSSA it is what was taken out of the base."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, init_lora_weights="pissa", target_modules=ATTENTION)
    peft.get_peft_model(load_transformers(model), config).save_pretrained(str(tmp_path))
    content = read_whole(find_source(tmp_path), options)
    rows, extras = content.rows, content.extras
    modules = lora_modules(read_model_config(model))
    assert not has_effect(rows, extras, modules)
    content = read_whole(find_source(adapters["pissa"]), options)
    rows, extras = content.rows, content.extras
    assert has_effect(rows, extras, modules)


def test_what_is_too_much_for_a_server_is_refused(adapters: dict[str, Path], options: ReadOptions) -> None:
    few = replace(options, bounds=replace(options.bounds, work=2**20))
    with pytest.raises(AdapterInvalidError, match="kasa needs a decomposition"):
        read_whole(find_source(adapters["kasa"]), few)
    small = replace(options, bounds=replace(options.bounds, rank=40))
    with pytest.raises(AdapterInvalidError, match=r"low_rank .64.: .* LOHA .* largest served is 40"):
        read_whole(find_source(adapters["loha of full rank"]), small)
