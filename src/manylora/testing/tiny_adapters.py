"""Random adapters for tiny models: PEFT directories and NeMo archives."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from manylora.testing.reference import load_transformers


def make_adapter(
    path: Path,
    model_dir: Path,
    seed: int = 0,
    rank: int = 8,
    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    alpha: float | None = None,
    **options: Any,
) -> Path:
    """A random adapter, written by PEFT, strong enough to change greedy answers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    options = {"target_modules": list(modules), "lora_alpha": alpha or 2 * rank, **options}
    adapted = get_peft_model(load_transformers(Path(model_dir)), LoraConfig(r=rank, **options))
    strength = 0.1 if adapted.config.is_encoder_decoder else 0.3  # T5's scores are not scaled
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * (strength / rank**0.25))
            elif parameter.requires_grad:  # biases, modules_to_save, trained tokens: they start as the base's
                parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(str(path))
    return Path(path)


def make_nemo(path: Path, model_dir: Path, seed: int = 0, rank: int = 6) -> tuple[Path, Path]:
    """A random NeMo archive for q, k and v together, and the directory of an equal PEFT adapter."""
    from safetensors.torch import load_file, save_file

    from manylora.model.checkpoint import read_model_config
    from manylora.model.families import FAMILIES as ARCHITECTURES

    model = read_model_config(Path(model_dir))
    names = [name.rpartition(".")[2] for name in ARCHITECTURES[model.architecture].names(model).qkv]
    peft = make_adapter(path / "peft", model_dir, seed, rank, names, alpha=rank)
    tensors = load_file(peft / "adapter_model.safetensors")
    parts = (model.q_size, model.kv_size, model.kv_size)
    state: dict[str, torch.Tensor] = {}
    for layer in range(model.num_layers):
        a = torch.randn(rank, model.hidden_size) * 0.2
        b = torch.randn(sum(parts), rank) * 0.2
        prefix = f"model.decoder.layers.{layer}.self_attention.adapter_layer.lora_kqv_adapter"
        state[f"{prefix}.linear_in.weight"], state[f"{prefix}.linear_out.weight"] = a, b
        stacked = [part.reshape(model.qkv_groups, -1, rank) for part in b.split(parts)]
        grouped = torch.cat(stacked, dim=1).reshape(-1, rank)
        rows = b.split(parts) if len(names) == 3 else (grouped,)
        for name, part in zip(names, rows, strict=True):
            [key] = [k for k in tensors if re.search(rf"\.(layers|h)\.{layer}\..*\.{name}\.lora_A\.", k)]
            tensors[key], tensors[key.replace("lora_A", "lora_B")] = a.clone(), part.contiguous()
    save_file(tensors, peft / "adapter_model.safetensors", metadata={"format": "pt"})
    archive = path / "adapter.nemo"
    _write_nemo(archive, state, f"num_layers: {model.num_layers}\nhidden_size: {model.hidden_size}\n")
    return archive, peft


def _write_nemo(archive: Path, state: dict[str, torch.Tensor], config: str) -> None:
    weights = io.BytesIO()
    torch.save(state, weights)
    with tarfile.open(archive, "w") as tar:
        members = (("model_config.yaml", config.encode()), ("model_weights.ckpt", weights.getvalue()))
        for name, data in members:
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
