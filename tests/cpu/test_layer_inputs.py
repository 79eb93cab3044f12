"""Protects per-layer embeddings: what each layer gets of a token, and the rows adapters have for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import make_model

from manylora.config.blocks import LayerInputsConfig
from manylora.kernels.reference import ReferenceOps
from manylora.lora.formats.peft.names import LORA_NAMES
from manylora.lora.modules import LoraModuleId, lora_modules
from manylora.model.checkpoint import read_model_config
from manylora.model.layer_inputs import LayerInputs
from manylora.model.layers import LoraLinear, Norm
from manylora.model.plan import checkpoint_plan
from manylora.parallel.mapping import Mapping
from manylora.parallel.weights import rank_plan

OWN = LayerInputsConfig(dim=6, vocab_size=20, layers=3)


def test_a_vector_of_each_layer_for_each_token() -> None:
    torch.manual_seed(1)
    ops, table, weight, scale = ReferenceOps(), torch.randn(20, 18), torch.randn(18, 10), torch.randn(6)
    made = LayerInputs(OWN, table, LoraLinear(ops, 0, weight, None, ()), Norm(ops, scale, None, 1e-6))
    ids, x = torch.tensor([3, 19, 25, 0]), torch.randn(4, 10)
    found = made(ids, x, None)
    assert found.shape == (3, 4, 6)
    known = torch.tensor([3, 19, 0, 0])  # beyond the table is its first row
    for layer in range(3):
        part = slice(6 * layer, 6 * layer + 6)
        projected = F.rms_norm((x @ weight[part].T) * 10**-0.5, (6,), scale, 1e-6)
        assert torch.allclose(found[layer], (projected + table[known][:, part] * 6**0.5) * 2**-0.5, atol=1e-5)


def test_modules_and_weights(tmp_path: Path) -> None:
    config = replace(read_model_config(make_model(tmp_path, "llama")), layer_inputs=replace(OWN, layers=2))
    modules = lora_modules(config)
    outside = modules[LoraModuleId.PER_LAYER_MODEL_PROJECTION]
    assert (outside.in_dim, outside.out_dim, outside.layers) == (64, 12, {0})
    gate, back = modules[LoraModuleId.PER_LAYER_INPUT_GATE], modules[LoraModuleId.PER_LAYER_PROJECTION]
    assert (gate.in_dim, gate.out_dim, gate.layers) == (64, 6, None)
    assert (back.in_dim, back.out_dim) == (6, 64)
    plan = checkpoint_plan(config, ())
    assert plan["layer_inputs.embed"].shape == (20, 12)
    assert plan["1.input_gate.weight"].slices[0].source == "model.layers.1.per_layer_input_gate.weight"
    part = rank_plan(plan, config, Mapping(4, 3, 2, 2))  # the second half of the tokens and of the layers
    assert part["layer_inputs.embed"].shape == (10, 6)
    assert part["layer_inputs.embed"].slices[0].start == 10
    assert list(part["layer_inputs.embed"].column_range) == list(range(6, 12))
    assert "layer_inputs.project.weight" not in part
    assert "0.input_gate.weight" in part


@pytest.mark.parametrize("root", ["base_model.model.model.", "base_model.model.model.language_model."])
def test_names_in_peft(root: str) -> None:
    for name, layer, module_id in (
        ("per_layer_model_projection", 0, LoraModuleId.PER_LAYER_MODEL_PROJECTION),
        ("layers.3.per_layer_input_gate", 3, LoraModuleId.PER_LAYER_INPUT_GATE),
        ("layers.11.per_layer_projection", 11, LoraModuleId.PER_LAYER_PROJECTION),
        ("layers.2.self_attn.q_proj", 2, LoraModuleId.ATTN_Q),
    ):
        found = LORA_NAMES.find(f"{root}{name}.lora_B.weight")
        assert found is not None
        assert (found.number, found.module_id) == (layer, module_id)
    assert not LORA_NAMES.find(f"{root}layers.0.per_layer_model_projection.lora_B.weight")
