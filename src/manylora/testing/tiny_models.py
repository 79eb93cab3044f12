"""Tiny random models, from a seed. Adapters for them and the answers to expect are importable from here too.

Needs transformers and peft, imported where they are used.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from manylora.quant.config import QuantConfig
from manylora.testing.reference import auto_class, reference_generate, reference_logits
from manylora.testing.tiny_adapters import make_adapter, make_nemo
from manylora.testing.tiny_configs import (
    BEGIN_ID,
    COMMON,
    ENCODER_DECODER_FAMILIES,
    FAMILIES,
    MOE_FAMILIES,
)

__all__ = [
    "ENCODER_DECODER_FAMILIES", "FAMILIES", "MOE_FAMILIES", "make_adapter", "make_model", "make_nemo",
    "make_wide", "reference_generate", "reference_logits",
]  # fmt: skip

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(
    path: Path,
    family: str = "llama",
    seed: int = 0,
    sharded: bool = False,
    stacked: bool = False,
    **overrides: Any,
) -> Path:
    """A random model of a variant in `tiny_configs`, as a Hugging Face directory with a byte tokenizer.

    sharded: in several files. stacked: the experts of a layer in two tensors, as transformers has them in
    memory. overrides: of the variant's settings.
    """
    from transformers import AutoConfig

    kind, variant = {**FAMILIES, **MOE_FAMILIES, **ENCODER_DECODER_FAMILIES}[family]
    settings: dict[str, Any] = COMMON
    torch.manual_seed(seed)
    if family in ENCODER_DECODER_FAMILIES:
        settings = {name: value for name, value in COMMON.items() if not name.startswith(("num_", "hidden"))}
    config = AutoConfig.for_model(kind, **{**settings, **variant, **overrides})
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        if variant.get("feed_forward_proj"):  # T5 1.1 has a separate head
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.2)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms, which start as zeros and ones
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if config.is_encoder_decoder:  # else a tied head repeats the last token for ever
            for name, parameter in model.named_parameters():
                if re.search(r"attn|Attention\.[qkvo]\.|fc|wi|wo", name) and parameter.ndim == 2:
                    parameter.mul_(1.5)
    size = "40KB" if sharded else "5GB"
    model.save_pretrained(path, max_shard_size=size, save_original_format=not stacked)
    _save_tokenizer(Path(path))
    return Path(path)


def make_wide(path: Path, model_dir: Path, quant: QuantConfig, linears: Sequence[str]) -> Path:
    """A copy of a plain model with the weights of its linear layers rounded as `quant` rounds them.

    linears: the ends of the names of the layers.
    """
    from safetensors.torch import load_file, save_file

    from manylora.model.checkpoint import read_model_config
    from manylora.model.quant import quantise

    shutil.copytree(model_dir, path)
    weights = load_file(path / "model.safetensors")
    transposed = read_model_config(path).transposed_weights
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module != name and module.endswith(tuple(linears)) and quant.quantises(module):
            rounded = quantise(weight.T.contiguous() if transposed else weight, quant).wide()
            weights[name] = (rounded.T if transposed else rounded).contiguous()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def _save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN_ID)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
