"""Tiny random models and adapters from seeds, and the results of transformers + PEFT for comparison.

Both libraries are imported only when they are used.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_configs import (
    BEGIN_ID,
    COMMON,
    ENCODER_DECODER_FAMILIES,
    FAMILIES,
    MOE_FAMILIES,
)

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_source
from manylora.adapters.modules import LoraModule
from manylora.checkpoints.quant.config import QuantConfig

# Vision-language models, which are not in transformers' AutoModelForCausalLM.
SEEING = (
    "gemma3", "mistral3", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe",
    "llama4",
)  # fmt: skip
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

    sharded: whether the weights are in several files. stacked: whether the experts of a layer are in two
    tensors, as transformers has them in memory. overrides: replace settings of the variant.
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
        for name, value in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):  # zeros
                value.normal_(std=0.3)
            if name.endswith("layer_scalar"):  # ones
                value.uniform_(0.5, 1.5)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms, which start as zeros and ones
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # otherwise most heads forget all but the last token
                parameter.sub_(3)
        if config.is_encoder_decoder:  # otherwise a tied head always repeats the last token
            for name, parameter in model.named_parameters():
                if re.search(r"attn|Attention\.[qkvo]\.|fc|wi|wo", name) and parameter.ndim == 2:
                    parameter.mul_(1.5)
    size = "40KB" if sharded else "5GB"
    model.save_pretrained(path, max_shard_size=size, save_original_format=not stacked)
    _save_tokenizer(Path(path))
    return Path(path)


def make_wide(path: Path, model_dir: Path, quant: QuantConfig, linears: Sequence[str]) -> Path:
    """A copy of a plain model, with the weights of its linear layers rounded as `quant` does.

    linears: the last parts of the layers' names.
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


def make_adapter(
    path: Path,
    model_dir: Path,
    seed: int = 0,
    rank: int = 8,
    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    alpha: float | None = None,
    **options: Any,
) -> Path:
    """A random LoRA adapter, written by PEFT. It is strong enough to change greedy answers."""
    from peft import LoraConfig

    options = {"target_modules": list(modules), "lora_alpha": alpha or 2 * rank, **options}
    return make_kind(path, model_dir, LoraConfig(r=rank, **options), seed)


def make_kind(path: Path, model_dir: Path, config: Any, seed: int = 0, strength: float | None = None) -> Path:
    """A random adapter of any kind, written by PEFT. config: a PeftConfig. strength: standard deviation of
    the matrices, None for a default."""
    from peft import get_peft_model

    torch.manual_seed(seed)
    adapted = get_peft_model(load_transformers(Path(model_dir)), config)
    if strength is None:  # less for T5, whose attention scores are not scaled
        strength = (0.1 if adapted.config.is_encoder_decoder else 0.3) / config.r**0.25
    prefix = adapted.base_model.prefix.removesuffix("_")
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif prefix in name and parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * strength)
            elif (
                parameter.requires_grad
            ):  # biases, modules_to_save, trained tokens, which start as the base's
                parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(str(path))
    return Path(path)


def make_tuned(path: Path, model_dir: Path, settings: Any, seed: int = 0) -> Path:
    """A random adapter of any tuner in PEFT: noise is added to all trained parameters. settings: a
    PeftConfig."""
    from peft import get_peft_model

    torch.manual_seed(seed)
    adapted = get_peft_model(load_transformers(Path(model_dir)), settings)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(str(path))
    return Path(path)


def make_nemo(path: Path, model_dir: Path, seed: int = 0, rank: int = 6) -> tuple[Path, Path]:
    """A random NeMo archive for the fused q, k and v, and the directory of an equal PEFT adapter."""
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


def reference_generate(
    model_dir: Path,
    adapter_dir: Path | None,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    encoder_ids: Sequence[int] = (),
) -> list[int]:
    """The greedy continuation of transformers (+ PEFT) in float32. It never stops early. encoder_ids: the
    encoder's prompt, for an encoder-decoder model.
    """
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids.append(int(reference_logits(model_dir, adapter_dir, ids, encoder_ids=encoder_ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def reference_logits(
    model_dir: Path,
    adapter_dir: Path | None,
    ids: Sequence[int],
    dtype: torch.dtype = torch.float32,
    encoder_ids: Sequence[int] = (),
) -> torch.Tensor:
    """Logits [len(ids), vocab] of transformers (+ PEFT), computed in `dtype` and returned as float32."""
    model = _reference(Path(model_dir), Path(adapter_dir) if adapter_dir else None, dtype)
    inputs = {"decoder_input_ids" if encoder_ids else "input_ids": torch.tensor([list(ids)])}
    if encoder_ids:
        inputs["input_ids"] = torch.tensor([list(encoder_ids)])
    with torch.inference_mode():
        return model(**inputs).logits[0].float()


@lru_cache(maxsize=64)
def _reference(model_dir: Path, adapter_dir: Path | None, dtype: torch.dtype = torch.float32) -> Any:
    model = load_transformers(model_dir)
    if adapter_dir is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter_dir))
    return model.to(dtype).eval()


def load_transformers(model_dir: Path) -> Any:
    """The transformers model in float32, with eager attention."""
    from transformers import AutoConfig

    kind = auto_class(AutoConfig.from_pretrained(model_dir))
    return kind.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")


def auto_class(config: Any) -> Any:
    """The AutoModel class for a configuration of transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    if config.model_type in SEEING:
        return AutoModelForImageTextToText
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


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


def _write_nemo(archive: Path, state: dict[str, torch.Tensor], config: str) -> None:
    weights = io.BytesIO()
    torch.save(state, weights)
    with tarfile.open(archive, "w") as tar:
        members = (("model_config.yaml", config.encode()), ("model_weights.ckpt", weights.getvalue()))
        for name, data in members:
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def read_adapter_folder(
    folder: Path, base: BaseWeights | None = None, modules: Mapping[int, LoraModule] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] and config [1, rows, 3 or 4] of a folder of any format."""
    return read_source(find_source(folder), ReadOptions(modules, base, float8=False))
