"""Protects Gemma 4: layers whose heads differ in size and number, in the KV cache and in adapters; values
that are keys; experts beside an MLP; and the text of the multimodal checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from driver import Driver, agree
from parity import read_from
from running import tokens
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model, reference_logits

from manylora.adapters.report import BaseModel, inspect_adapter
from manylora.config.engine import LoraCacheConfig
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module", params=["gemma4", "gemma4-moe", "gemma4-shared"])
def model(request: pytest.FixtureRequest, workshop: Path) -> Path:
    return make_model(workshop / request.param, request.param, seed=6)


@pytest.fixture(scope="module")
def adapter(model: Path, workshop: Path) -> Path:
    """On every linear layer, those of experts and the router too."""
    sparse, own = model.name == "gemma4-moe", ["per_layer_input_gate", "per_layer_projection"]
    parts = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} if sparse else {}
    names = (*ATTENTION, *MLP, *(["router.proj"] if sparse else []), *(own if "shared" in model.name else []))
    return make_adapter(workshop / f"{model.name}-adapters" / "1", model, 1, 4, names, **parts)


def test_adapters_of_one_batch(model: Path, adapter: Path) -> None:
    decoder = load_decoder(model, read_model_config(model), torch.float32, open_device("cpu"))
    tensors = read_from(adapter, model)
    found = Driver(decoder, [tokens(40), tokens(33, 5), tokens(40)], [tensors, None, None]).run()
    wanted = [(adapter, tokens(40)), (None, tokens(33, 5)), (None, tokens(40))]
    for logits, (lora, ids) in zip(found, wanted, strict=True):
        assert agree(logits, reference_logits(model, lora, ids))
    assert not agree(found[0], found[2])


def test_an_adapter_of_values_that_are_keys_is_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / WEIGHTS)
    keys = {key: value for key, value in weights.items() if "layers.1.self_attn.k_proj" in key}
    assert keys
    save_file({**weights, **{key.replace("k_proj", "v_proj"): v.clone() for key, v in keys.items()}},
              folder / WEIGHTS, {"format": "pt"})  # fmt: skip
    base = BaseModel(model, read_model_config(model), LoraCacheConfig())
    assert inspect_adapter(adapter, base).problem is None
    problem = inspect_adapter(folder, base).problem
    assert problem is not None and "layer 1 of this model has no module attn_v" in problem


def test_the_keys_of_the_first_releases(model: Path, tmp_path: Path) -> None:
    """`global_head_dim` where transformers writes `per_layer_config`."""
    raw = json.loads((model / "config.json").read_text())
    raw.pop("per_layer_config")
    raw |= {"global_head_dim": 40, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    weights = tmp_path / "model.safetensors"
    weights.symlink_to(model / "model.safetensors")
    assert read_model_config(tmp_path).layer_shapes == read_model_config(model).layer_shapes
