"""The models, adapters and requests that the CPU benchmarks share. All but smollm2 are random and seeded.

small is a Llama of 125 million parameters, mid a Qwen2 of 387 million, 7b has Llama-2-7B's shape, smollm2 is
the published SmolLM2-135M-Instruct. 32 requests, 16 concurrent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("llama", {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                        "num_key_value_heads": 4, "intermediate_size": 2048}),
    "mid": ("qwen2", {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
                      "num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True}),
    "7b": ("llama", {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                     "num_key_value_heads": 32, "intermediate_size": 11008}),
    "smollm2": ("llama", {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
                          "num_key_value_heads": 3, "intermediate_size": 1536}),
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "examples"), str(ROOT / "tests")]
VOCAB = 32000
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 1024, "initializer_range": 0.02}
REQUESTS, AT_ONCE, OUTPUT = 32, 16, 64
QKV = ("q_proj", "k_proj", "v_proj")
ALL = (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER_STD = 0.02  # enough to change greedy answers


@dataclass(frozen=True)
class Case:
    """A set of adapters. ranks: used in turn by the distinct adapters. adapters: how many there are, 0 for
    requests for the base model. popularity: "even", or "zipf", where the n-th adapter is used 1 / n as often
    as the first."""

    name: str
    ranks: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    adapters: int = 0
    popularity: str = "even"

    def choose(self, count: int) -> list[int | None]:
        """The adapter of each of `count` requests, None for the base model."""
        if not self.adapters:
            return [None] * count
        if self.popularity == "even":
            return [i % self.adapters for i in range(count)]
        weights = 1 / np.arange(1, self.adapters + 1)
        picks = np.random.default_rng(11).choice(self.adapters, count, p=weights / weights.sum())
        return [int(i) for i in picks]


def prompts(count: int, length: int, seed: int = 7) -> list[list[int]]:
    picks = np.random.default_rng(seed)
    return [[int(i) for i in picks.integers(300, VOCAB, length)] for _ in range(count)]


def save_model(path: Path, name: str, dtype: str) -> Path:
    """Write one of MODELS as a Hugging Face directory with weights in `dtype`."""
    if name == "smollm2":
        from transformers import AutoModelForCausalLM, GgufConfig

        file, plain = smollm2(), GgufConfig(dequantize=True)
        given = {"gguf_file": file.name, "quantization_config": plain, "dtype": dtype}
        AutoModelForCausalLM.from_pretrained(file.parent, **given).save_pretrained(path)
        return path
    from tiny_models import make_model

    kind, shape = MODELS[name]
    make_model(path, kind, **COMMON, **shape)
    file = path / "model.safetensors"
    weights = {key: tensor.to(getattr(torch, dtype)) for key, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"dtype": dtype}), encoding="utf-8")
    return path


def smollm2() -> Path:
    """The published GGUF file in Q4_1, downloaded once."""
    from real_models import fetch

    return fetch("smollm2")


def make_llama(path: Path, hidden: int, layers: int) -> Path:
    """Write a float32 Llama with heads of 64 and a vocabulary of 8,192, to benchmark servers."""
    from tiny_models import make_model

    heads = hidden // 64
    return make_model(
        path, "llama", hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=512, vocab_size=8192,
        initializer_range=0.02,
    )  # fmt: skip


def module_sizes(model: str) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear layer of a block."""
    shape = MODELS[model][1]
    hidden, middle = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return {
        **dict.fromkeys(("q_proj", "o_proj"), (hidden, hidden)),
        **dict.fromkeys(("k_proj", "v_proj"), (hidden, kv)),
        **dict.fromkeys(("gate_proj", "up_proj"), (hidden, middle)),
        "down_proj": (middle, hidden),
    }


def save_adapter(path: Path, model: str, rank: int, modules: tuple[str, ...], seed: int, dtype: str) -> Path:
    """Write a PEFT directory. lora_alpha is twice the rank."""
    shape, sizes = MODELS[model][1], module_sizes(model)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for module in modules:
            block = "self_attn" if module in ALL[:4] else "mlp"
            stem, (wide, out) = f"base_model.model.model.layers.{layer}.{block}.{module}", sizes[module]
            for part, size in (("lora_A", (rank, wide)), ("lora_B", (out, rank))):
                values = torch.randn(size, generator=random) * ADAPTER_STD
                tensors[f"{stem}.{part}.weight"] = values.to(getattr(torch, dtype))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
              "target_modules": list(modules), "bias": "none", "lora_dropout": 0.0}  # fmt: skip
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads an argument that names some of these, separated by commas."""

    def read(text: str) -> list[str]:
        chosen = text.split(",")
        if wrong := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(wrong))} not among {', '.join(known)}")
        return chosen

    return read


def numbers_to(most: int) -> Callable[[str], list[int]]:
    """Reads an argument of numbers from 1 to this, separated by commas."""

    def read(text: str) -> list[int]:
        found = [int(part) for part in text.split(",")]
        if not all(1 <= number <= most for number in found):
            raise argparse.ArgumentTypeError(f"must be from 1 to {most}, got {text}")
        return found

    return read
