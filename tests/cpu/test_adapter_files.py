"""Protects what files of PEFT adapters may be beside the usual: values in 8-bit floats, and fused gate and up
projections whose halves were swapped beforehand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_cases import WEIGHTS, edited
from driver import Driver, agree
from parity import make_kind
from safetensors.torch import load_file
from tiny_models import make_adapter, make_model, reference_logits

from manylora import LoraConfig
from manylora.adapters.convert import normalize_dora
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import lora_modules
from manylora.doors.python.options import modules_to_read
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder

FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("kind", ["DoRA", "both + DoRA", "lora_bias"])
def test_adapters_in_float8(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", seed=3)
    made = make_kind(tmp_path / "made", model, kind, 1)
    matrices = {key: value for key, value in load_file(made / WEIGHTS).items() if ".lora_" in key}
    adapter = edited(made, tmp_path / "float8", {key: value.to(FLOAT8) for key, value in matrices.items()})
    config, base = read_model_config(model), BaseWeights(model)
    modules = lora_modules(config)
    lora = read_lora(find_source(adapter), 0, ReadOptions(modules=modules, base=base, float8=False))
    ids = [i % 250 for i in range(3, 300, 7)]
    decoder = load_decoder(model, config, torch.float32, open_device("cpu"))
    [found] = Driver(decoder, [ids], [lora]).run()
    assert agree(found, reference_logits(model, adapter, ids))
    assert not agree(found, reference_logits(model, made, ids))
    if kind == "DoRA":  # normal magnitudes would be rounded hard, so they are written wider
        normalize_dora(adapter, model, tmp_path / "normal")
        again = read_lora(
            find_source(tmp_path / "normal"), 0, ReadOptions(modules=modules, base=base, float8=False)
        )
        np.testing.assert_allclose(again.weights, lora.weights, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}])
def test_halves_that_were_swapped_beforehand(options: dict, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "phi3", seed=3)
    modules = ("qkv_proj", "gate_up_proj", "down_proj")
    adapter = make_adapter(tmp_path / "made", model, 1, 4, modules, **options)
    found = load_file(adapter / WEIGHTS)
    keys = [key for key in found if "gate_up_proj" in key and "lora_A" not in key]
    halves = {key: found[key].roll(len(found[key]) // 2, 0) for key in keys}
    swapped = edited(adapter, tmp_path / "swapped", halves)
    known, base = lora_modules(read_model_config(model)), BaseWeights(model)
    as_is = modules_to_read(known, LoraConfig(swap_gate_up_proj_lora_b_weight=False))
    one = read_lora(find_source(adapter), 0, ReadOptions(modules=known, base=base))
    other = read_lora(find_source(swapped), 0, ReadOptions(modules=as_is, base=base))
    wrong = read_lora(find_source(swapped), 0, ReadOptions(modules=known, base=base))
    np.testing.assert_allclose(one.weights, other.weights, rtol=1e-6)
    assert not np.allclose(one.weights, wrong.weights)
    for ours, theirs in zip(one.extras, other.extras, strict=True):
        np.testing.assert_array_equal(ours.values, theirs.values)
