"""Protects mixtures of experts: logits and greedy tokens equal transformers + PEFT, with adapters on every
module, many of them and the base model in one batch; what cannot be served is refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parity_adapters import agree, mixed_logits, open_store, tokens

from manylora.config import EngineConfig, LoraCacheConfig
from manylora.device import open_device
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.lora.catalog import read_adapter_folder
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.npy import write_npy
from manylora.lora.modules import MODULE_NAMES, lora_modules
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder
from manylora.request import LoraInput, Request, SamplingParams
from manylora.testing import MOE_FAMILIES, make_adapter, make_model, reference_generate, reference_logits

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = ["mlp.gate.weight"]
KINDS: dict[str, dict[str, Any]] = {
    "experts": {"rank": 4, "target_parameters": EXPERTS, "modules": ATTENTION},
    "experts and router": {"rank": 3, "target_parameters": [*EXPERTS, *ROUTER], "modules": ()},
    "rank 1": {"rank": 1, "target_parameters": EXPERTS[1:], "modules": ("q_proj",)},
    "rank 512": {"rank": 512, "target_parameters": EXPERTS[:1], "modules": ()},
    "patterns": {
        "rank": 4,
        "target_parameters": [*EXPERTS, *ROUTER],
        "modules": ATTENTION,
        "rank_pattern": {r".*\.gate_up_proj": 9, "layers.1.mlp.experts.down_proj": 2, "gate.weight": 7},
        "alpha_pattern": {"experts.gate_up_proj": 5, "layers.1.mlp.gate.weight": 20},
    },
    "rsLoRA": {"rank": 6, "target_parameters": EXPERTS, "modules": ("v_proj",), "use_rslora": True},
    "attention": {"rank": 8, "modules": ATTENTION},
}
SHARED = {
    "rank": 5,
    "modules": tuple(f"shared_expert.{n}_proj" for n in ("gate", "up", "down")) + ("shared_expert_gate",),
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moe")


def by_number(adapter: Path, path: Path, mixtral: bool) -> Path:
    """The same adapter as it was written before experts were stacked: matrices of each expert by its number."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, torch.Tensor] = {}
    for key, value in load_file(adapter / "adapter_model.safetensors").items():
        key = key.replace(".mlp.", ".block_sparse_moe.") if mixtral else key
        head, experts, tail = key.partition(".experts.")
        if not experts:
            found[key] = value
            continue
        gate_up, rank = "base_layer" in tail, config["r"]
        side = "lora_A" if "lora_A" in tail else "lora_B"
        if side == "lora_A":
            each = value.unflatten(0, (-1, rank))
            parts = [each, each] if gate_up else [each]
        else:
            each = value.unflatten(1, (rank, -1)).permute(2, 0, 1)
            parts = list(each.chunk(2, dim=1)) if gate_up else [each]
        for name, part in zip(names[:2] if gate_up else names[2:], parts, strict=True):
            for number, matrix in enumerate(part):
                found[f"{head}.experts.{number}.{name}.{side}.weight"] = matrix.contiguous()
    path.mkdir()
    save_file(found, path / "adapter_model.safetensors")
    config.update(target_parameters=None, target_modules=[*names, "gate", *ATTENTION])
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("family", sorted(MOE_FAMILIES))
def test_every_kind_in_one_batch(family: str, workshop: Path) -> None:
    model = make_model(workshop / family, family, seed=8, sharded=family == "qwen2-moe")
    kinds = {**KINDS, "shared expert": SHARED} if family.startswith("qwen2") else KINDS
    adapters: list[Path | None] = [None]
    for number, options in enumerate(kinds.values()):
        adapters.append(make_adapter(workshop / f"{family}-{number}", model, number, **options))
    inputs = [LoraInput(i, *read_adapter_folder(a)) if a else None for i, a in enumerate(adapters)]
    for i, (adapter, found) in enumerate(zip(adapters, mixed_logits(model, inputs), strict=True)):
        assert agree(found, reference_logits(model, adapter, tokens(20, i))), ["base", *kinds][i]
