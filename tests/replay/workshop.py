"""A tiny model and adapters of it whose values are exact, so that every machine has the same files: whole
multiples of a power of two, from a generator of integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
from safetensors.numpy import load_file, save_file
from tiny_models import make_adapter, make_model, make_tuned

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
INVOCATION = [7, 9]

LORA: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4},
    "rank-1": {"rank": 1, "modules": ["q_proj"]},
    "every-module": {"rank": 3, "modules": ALL},
    "rslora": {"rank": 4, "use_rslora": True},
    "patterns": {"rank": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 1}},
    "one-layer": {"rank": 4, "layers_to_transform": [1], "layers_pattern": "layers"},
    "bias": {"rank": 2, "bias": "all"},
    "lora-bias": {"rank": 2, "lora_bias": True},
    "dora": {"rank": 4, "use_dora": True},
    "saved": {"rank": 2, "modules_to_save": ["embed_tokens", "norm"]},
    "head": {"rank": 2, "modules": ["q_proj", "lm_head"]},
    "tokens": {"rank": 2, "trainable_token_indices": [72, 101, 108]},
    "activated": {"rank": 4, "alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM"},
}
"""Options of `make_adapter`."""
TUNED: dict[str, Callable[[], peft.PeftConfig]] = {
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt": lambda: peft.PromptTuningConfig(**VIRTUAL),
    "prefix": lambda: peft.PrefixTuningConfig(**VIRTUAL),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "loha": lambda: peft.LoHaConfig(r=3, alpha=3, target_modules=["q_proj", "v_proj"]),
    "lokr": lambda: peft.LoKrConfig(r=2, alpha=2, target_modules=["q_proj", "v_proj"]),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"]),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, r=0, target_modules=["q_proj"]),
}
KINDS = (*LORA, *TUNED)


def make_exact_model(path: Path) -> Path:
    make_model(path, "llama")
    return _exact(path, 1, "model.safetensors", 96)


@cache
def make_kind(folder: Path, model: Path, kind: str) -> Path:
    """An adapter of one of KINDS, in a folder of that name."""
    seed, path = 10 + KINDS.index(kind), folder / kind
    if kind in LORA:
        make_adapter(path, model, seed, **LORA[kind])
    else:
        make_tuned(path, model, TUNED[kind](), seed)
    return _exact(path, seed, "adapter_model.safetensors", 64)


def _exact(folder: Path, seed: int, file: str, most: int) -> Path:
    """New values for all tensors but the base's: up to `most` / 256, and gains of norms around 1."""
    drawn = np.random.default_rng(seed)
    tensors = load_file(folder / file)
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype.kind != "f" or "base_layer" in name:
            continue
        values = drawn.integers(-most, most + 1, tensor.shape).astype(tensor.dtype) / 256
        tensors[name] = values + 1 if "norm" in name or "magnitude" in name else values
    save_file(tensors, folder / file, {"format": "pt"})
    return folder
