"""Protects attention over latents and routing by groups: DeepSeek V2 and V3, GLM-4.5 MoE and its small one.
`test_moe.py` compares their adapters on experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, agree
from running import read, tokens
from safetensors.torch import load_file, save_file
from test_parity_adapters import mixed_logits
from tiny_models import make_adapter, make_model, reference_logits

from manylora.adapters.modules import MODULE_NAMES, lora_modules
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder
from manylora.request import LoraInput

pytestmark = pytest.mark.usefixtures("one_thread")

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
NORMS = ["q_a_layernorm", "kv_a_layernorm"]
KINDS: dict[str, dict[str, Any]] = {
    "DoRA": {"rank": 5, "modules": LATENT, "use_dora": True},
    "DoRA + rsLoRA": {"rank": 3, "modules": LATENT[3:], "use_dora": True, "use_rslora": True},
    "biases": {"rank": 4, "modules": LATENT, "lora_bias": True},
    "norms": {"rank": 4, "modules": LATENT[:1], "modules_to_save": NORMS},
    "kv_b_proj": {"rank": 64, "modules": ("kv_b_proj",)},
    "patterns": {"rank": 4, "modules": LATENT, "rank_pattern": {"layers.1.self_attn.kv_b_proj": 9}},
}


def logits_of(model: Path, ids: list[list[int]], adapters: list[LoraInput | None]) -> list[torch.Tensor]:
    decoder = load_decoder(model, read_model_config(model), torch.float32, open_device("cpu"))
    return Driver(decoder, ids, adapters).run()


@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3-plain"])
def test_kinds_of_adapters_in_one_batch(family: str, workshop: Path) -> None:
    model = make_model(workshop / family, family, seed=21)
    adapters = [
        make_adapter(workshop / f"{family}-{i}", model, i, **options)
        for i, options in enumerate(KINDS.values())
    ]
    ids = [tokens(20 + 3 * i, i) for i in range(len(KINDS) + 1)]
    found = logits_of(model, ids, [None, *(read(adapter, model) for adapter in adapters)])
    for kind, adapter, one, logits in zip(["base", *KINDS], [None, *adapters], ids, found, strict=True):
        assert agree(logits, reference_logits(model, adapter, one)), kind
        assert adapter is None or not agree(logits, reference_logits(model, None, one)), kind


NAMES = {
    "attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a": "self_attn.kv_a_proj_with_mqa", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_dense": "self_attn.o_proj",
    "mlp_h_to_4h": "mlp.gate_proj", "mlp_gate": "mlp.up_proj", "mlp_4h_to_h": "mlp.down_proj",
    "moe_router": "mlp.gate", "shared_expert_h_to_4h": "mlp.shared_experts.gate_proj",
    "shared_expert_gate": "mlp.shared_experts.up_proj",
    "shared_expert_4h_to_h": "mlp.shared_experts.down_proj",
    "moe_h_to_4h": "mlp.experts.{}.gate_proj", "moe_gate": "mlp.experts.{}.up_proj",
    "moe_4h_to_h": "mlp.experts.{}.down_proj",
}  # fmt: skip


def directory_and_merged(model: Path, path: Path, root: str) -> tuple[Path, Path]:
    """An adapter on every linear layer, by the names of the checkpoint, which PEFT cannot train all; and the
    model with it added to its weights. root: of the names."""
    modules, random = lora_modules(read_model_config(model)), np.random.default_rng(4)
    weights, tensors = load_file(model / "model.safetensors"), {}
    for layer in range(read_model_config(model).num_layers):
        for module in modules.values():
            if module.name not in NAMES or (module.layers is not None and layer not in module.layers):
                continue
            for expert in range(module.experts):
                name = f"layers.{layer}.{NAMES[module.name].format(expert)}"
                weight = weights[f"model.{name}.weight"]
                a, b = (
                    torch.from_numpy(random.normal(size=size, scale=0.2).astype(np.float32))
                    for size in ((3, weight.shape[1]), (weight.shape[0], 3))
                )
                tensors[f"{root}{name}.lora_A.weight"], tensors[f"{root}{name}.lora_B.weight"] = a, b
                weight += 2 * b @ a
    shutil.copytree(model, path / "merged")
    save_file(weights, path / "merged" / "model.safetensors", {"format": "pt"})
    (path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
    (path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    return path / "adapter", path / "merged"


@pytest.mark.parametrize("family", ["deepseek-v2-lite", "deepseek-v3", "glm4-moe", "glm4-moe-lite"])
def test_every_linear_layer_by_its_name(family: str, workshop: Path) -> None:
    """With the keys of PEFT and unsloth, and those of axolotl's merges of wrapped models."""
    model = make_model(workshop / f"all-{family}", family, seed=6)
    for number, root in enumerate(("base_model.model.model.", "base_model.model.base_model.model.model.")):
        adapter, merged = directory_and_merged(model, workshop / f"all-{family}-{number}", root)
        [found] = mixed_logits(model, [read(adapter, model)])
        assert agree(found, reference_logits(merged, None, tokens(20, 0)))
    known = {MODULE_NAMES[i] for i in lora_modules(read_model_config(model))}
    assert known - NAMES.keys() <= {"attn_qkv", "mlp_gate_up", "shared_expert_gate_up"}


def test_layers_that_predict_further_tokens_are_left_out(workshop: Path) -> None:
    model = make_model(workshop / "mtp", "deepseek-v3", seed=6)
    expected, weights = reference_logits(model, None, tokens(20)), load_file(model / "model.safetensors")
    weights["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert agree(logits_of(model, [tokens(20)], [None])[0], expected)
