"""Protects what Gemma 3n and 4 alone have: a text tower beside others, keys that layers share or that are
values, and what adapters may not have there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from driver import Driver, agree
from parity import read_from
from running import tokens
from safetensors.torch import load_file, save_file
from test_family_engines import Served
from tiny_models import make_adapter, make_model, make_tuned, reference_logits

from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import LoraModuleId, lora_modules
from manylora.adapters.report import BaseModel, inspect_adapter
from manylora.adapters.rules import AdapterRules
from manylora.config.engine import LoraCacheConfig
from manylora.errors import AdapterInvalidError
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder
from manylora.request import LoraInput

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def served(workshop: Path) -> Served:
    return Served(workshop / "gemma3n", "gemma3n")


def test_the_text_tower_of_a_model_that_sees_and_hears(served: Served, tmp_path: Path) -> None:
    """In the names of its release, with keys and values that layers do not use."""
    model = tmp_path / "model"
    shutil.copytree(served.model, model)
    raw = json.loads((model / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": raw,
    }
    (model / "config.json").write_text(json.dumps(outer))
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in load_file(model / "model.safetensors").items()
    }
    for tower in ("vision_tower.a", "audio_tower.b", "embed_vision.c", "embed_audio.d"):
        tensors[f"model.{tower}.weight"] = torch.ones(3)
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.language_model.layers.5.self_attn.{name}.weight"] = torch.ones(3)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    config, ids = read_model_config(model), tokens(30)
    adapter = tmp_path / "adapter"
    path = adapter / "adapter_model.safetensors"
    decoder = load_decoder(model, config, torch.float32, open_device("cpu"))
    for given in (served.adapters[2], served.adapters[1]):  # the first has magnitudes, relative to the base
        assert given is not None
        shutil.copytree(given, adapter, dirs_exist_ok=True)
        matrices = {
            name.replace("model.model.", "model.model.language_model."): value
            for name, value in load_file(path).items()
        }
        save_file(matrices, path, {"format": "pt"})
        # Beside a base of the text alone, too, whose names have no language_model.
        tensors = [read_from(adapter, base) for base in (model, served.model)]
        found = Driver(decoder, [ids] * 3, [None, *tensors]).run()
        assert agree(found[0], reference_logits(served.model, None, ids))
        for one in found[1:]:
            assert agree(one, reference_logits(served.model, given, ids))
    key = "base_model.model.model.audio_tower.conformer.0.attention.attn.q_proj.lora_A.weight"
    save_file({**matrices, key: torch.ones(3, 3)}, path, {"format": "pt"})
    with pytest.raises(AdapterInvalidError, match=r"audio_tower.* set lora_text_only"):
        read_from(adapter, model)
    text = read_lora(find_source(adapter), 0, ReadOptions(lora_modules(config), text_only=True))
    [again] = Driver(decoder, [ids], [text]).run()
    assert agree(again, found[1])


def test_what_adapters_may_not_have(served: Served, tmp_path: Path) -> None:
    from peft import PromptTuningConfig

    config = read_model_config(served.model)
    modules = lora_modules(config)
    assert modules[LoraModuleId.ALTUP_PROJECTIONS].layers == {0, 1}
    keys = modules[LoraModuleId.ATTN_K]
    assert keys.layers == {0, 1, 2}
    row = np.ones((1, 1, keys.in_dim + keys.out_dim), np.float32)
    rules = AdapterRules(modules, config.num_layers, 8)
    rules.check(LoraInput(1, row, np.array([[[keys.module_id, 2, 1]]], np.int32)))
    with pytest.raises(AdapterInvalidError, match="does not exist in layer 3 of this model"):
        rules.check(LoraInput(1, row, np.array([[[keys.module_id, 3, 1]]], np.int32)))
    table = make_adapter(tmp_path / "table", served.model, 1, rank=2, modules=["embed_tokens_per_layer"])
    with pytest.raises(AdapterInvalidError, match="the table of per-layer embeddings are not supported"):
        read_lora(find_source(table), 0, ReadOptions(modules))
    prompt = make_tuned(
        tmp_path / "prompt", served.model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(AdapterInvalidError, match="not supported on models with per-layer embeddings"):
        read_lora(find_source(prompt), 0, ReadOptions(modules))


def test_an_adapter_of_values_that_are_keys_is_refused(workshop: Path, tmp_path: Path) -> None:
    model = make_model(workshop / "gemma4", "gemma4", seed=6)
    adapter = make_adapter(tmp_path / "a", model, 1, 4, ("q_proj", "k_proj", "down_proj"))
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / "adapter_model.safetensors")
    keys = {key: value for key, value in weights.items() if "layers.1.self_attn.k_proj" in key}
    assert keys
    save_file({**weights, **{key.replace("k_proj", "v_proj"): v.clone() for key, v in keys.items()}},
              folder / "adapter_model.safetensors", {"format": "pt"})  # fmt: skip
    base = BaseModel(model, read_model_config(model), LoraCacheConfig())
    assert inspect_adapter(adapter, base).problem is None
    problem = inspect_adapter(folder, base).problem
    assert problem is not None and "layer 1 of this model has no module attn_v" in problem


def test_the_keys_of_the_first_gemma4(workshop: Path, tmp_path: Path) -> None:
    """`global_head_dim` where transformers writes `per_layer_config`."""
    model = make_model(workshop / "gemma4-keys", "gemma4")
    raw = json.loads((model / "config.json").read_text())
    raw.pop("per_layer_config")
    raw |= {"global_head_dim": 40, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(tmp_path).layer_shapes == read_model_config(model).layer_shapes
