"""Protects layers that read another layer's keys and values: they have none in the cache nor for adapters,
and give what transformers gives where their k_proj and v_proj repeat what those of the other layer gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, agree
from running import tokens
from tiny_models import load_transformers, make_adapter, make_model

from manylora.config.model import ModelConfig
from manylora.errors import AdapterInvalidError
from manylora.kernels.device import open_device
from manylora.lora.bounds import Bounds
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import LoraModuleId, lora_modules
from manylora.lora.rules import AdapterRules
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.model.weights import load_weights
from manylora.request import LoraInput

pytestmark = pytest.mark.usefixtures("one_thread")

SOURCES = (0, 1, 1, 0)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Echo(torch.nn.Module):
    """Gives again what another module gave last."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        self._last: list[torch.Tensor] = []
        other.register_forward_hook(
            lambda module, inputs, output: self._last.__setitem__(slice(None), [output])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._last[0]


def reference(model: Path, adapter: Path | None, ids: list[int]) -> torch.Tensor:
    from peft import PeftModel

    network: Any = load_transformers(model)
    if adapter is not None:
        network = PeftModel.from_pretrained(network, str(adapter))
    layers = network.get_base_model().model.layers if adapter else network.model.layers
    for layer, source in enumerate(SOURCES):
        for name in ("k_proj", "v_proj"):
            if source != layer:
                setattr(layers[layer].self_attn, name, Echo(getattr(layers[source].self_attn, name)))
    with torch.inference_mode():
        return network(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, ModelConfig]:
    """A Llama, an adapter on all of its linear layers, and the model's configuration with shared layers."""
    folder = tmp_path_factory.mktemp("shared-kv")
    model = make_model(folder / "model", "llama", seed=2, num_hidden_layers=4)
    adapter = make_adapter(folder / "adapter", model, 1, rank=4, modules=LINEARS)
    return model, adapter, replace(read_model_config(model), kv_sources=SOURCES)


def read(adapter: Path, config: ModelConfig, told: list[str] | None = None) -> LoraInput:
    modules = lora_modules(config)
    tell = (lambda line: None) if told is None else told.append
    bounds = Bounds.of(modules, config.num_layers, 64)
    return read_lora(find_source(adapter), 0, ReadOptions(modules, bounds=bounds, tell=tell))


def test_logits_with_and_without_an_adapter(made: tuple[Path, Path, ModelConfig]) -> None:
    """In one batch, in chunks, with keys of other sequences and NaN around them."""
    model, adapter, config = made
    device = open_device("cpu")
    config, weights = load_weights(model, config, torch.float32, device, take=lambda plan: plan)
    decoder = Decoder(config, weights, torch.float32, device.ops)
    told: list[str] = []
    found = Driver(decoder, [tokens(40, 1), tokens(25, 2)], [None, read(adapter, config, told)]).run()
    assert agree(found[0], reference(model, None, tokens(40, 1)))
    assert agree(found[1], reference(model, adapter, tokens(25, 2)))
    assert "layers.2.self_attn.k_proj.lora_A.weight and 7 other tensors are" in told[0]


def test_the_cache_has_no_place_for_them(made: tuple[Path, Path, ModelConfig]) -> None:
    config = made[2]
    assert config.kv_readers == {2, 3} and config.kv_layers == 2
    assert (config.kv_layers, replace(config, kv_sources=()).kv_layers) == (2, 4)


def test_adapters_have_no_keys_and_values_there(made: tuple[Path, Path, ModelConfig]) -> None:
    config = made[2]
    modules = lora_modules(config)
    assert modules[LoraModuleId.ATTN_Q].layers is None
    rules = AdapterRules(modules, config.num_layers, 8)
    for module_id in (LoraModuleId.ATTN_QKV, LoraModuleId.ATTN_K, LoraModuleId.ATTN_V):
        assert modules[module_id].layers == {0, 1}
        weights = np.ones((1, 1, modules[module_id].in_dim + modules[module_id].out_dim), np.float32)
        rules.check(LoraInput(1, weights, np.array([[[module_id, 1, 1]]], np.int32)))
        with pytest.raises(AdapterInvalidError, match="does not exist in layer 2 of this model"):
            rules.check(LoraInput(1, weights, np.array([[[module_id, 2, 1]]], np.int32)))


def test_dora_and_digests_do_not_read_what_is_without_effect(
    made: tuple[Path, Path, ModelConfig], tmp_path: Path
) -> None:
    model, _, config = made
    dora = make_adapter(tmp_path / "dora", model, 3, rank=3, modules=LINEARS, use_dora=True)
    options = ReadOptions(lora_modules(config), base=BaseWeights(model))
    rows = read_lora(find_source(dora), 0, options).config
    assert rows is not None
    assert {tuple(row) for row in rows[0, :, :2].tolist() if row[0] == LoraModuleId.ATTN_K} == {
        (2, 0),
        (2, 1),
    }
