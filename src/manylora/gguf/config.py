"""Builds config.json and generation_config.json from a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from manylora.errors import ConfigError, printable
from manylora.gguf.architectures import architecture_of
from manylora.gguf.container import Header
from manylora.gguf.fields import POOLINGS
from manylora.gguf.metadata import Metadata

DTYPES = {"F32": "float32", "BF16": "bfloat16"}
# Factors of rotary frequencies, which become part of the configuration.
FACTORS = {name: f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")}
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
EPS = "attention.layer_norm_epsilon"
UNPOOLED = (-1, 0, 4)  # not said, none, and by a classification head
OF_YARN = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}


def config_json(header: Header, factors: Callable[[str], list[float]]) -> dict[str, Any]:
    """factors: reads a small tensor. Raises ConfigError."""
    own = architecture_of(header)
    one = Metadata(header, header.metadata["general.architecture"])
    layers = one.layers
    embed = header.tensors.get("token_embd.weight")
    if embed is None:
        raise ConfigError(f"{header.path} lacks the tensor token_embd.weight")
    kept = Counter[str]()
    for tensor in header.tensors.values():
        kept[tensor.kind] += tensor.nbytes
    fields = own.fields(one)
    made = {
        "architectures": [own.architecture],
        "vocab_size": embed.shape[0],
        "hidden_size": one.number("embedding_length"),
        "intermediate_size": one.inner_size,
        "num_hidden_layers": layers,
        "num_attention_heads": one.heads,
        "head_dim": one.head_dim,
        "max_position_embeddings": one.number("context_length"),
        own.eps: one.number(EPS if one.get(EPS) is not None else "attention.layer_norm_rms_epsilon"),
        "rope_theta": one.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": not one.has("output.weight"),
        "dtype": DTYPES.get(kept.most_common(1)[0][0], "float16"),
        **fields,
    }
    if "num_key_value_heads" not in made:
        made["num_key_value_heads"] = one.number("attention.head_count_kv", one.heads)
    if "rope_parameters" in made:
        return made
    scaling = _scaling(one, factors)
    return made | scaling | _of_both(scaling, fields.get("rope_scaling"))


def _of_both(scaling: dict[str, Any], own: dict[str, Any] | None) -> dict[str, Any]:
    """What an architecture adds to its rotary scaling. If the file has none, the default of the architecture
    is not used.
    """
    if own is None:
        return {}
    if not scaling:
        return {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}
    return {"rope_scaling": scaling["rope_scaling"] | own}


def _scaling(one: Metadata, factors: Callable[[str], list[float]]) -> dict[str, Any]:
    """rope_scaling. A scaling with one factor per frequency is called longrope here."""
    kind = one.get("rope.scaling.type", "none")
    context = one.number("rope.scaling.original_context_length", one.number("context_length"))
    original = {"original_max_position_embeddings": context}
    attention = one.number("rope.scaling.attn_factor", 1.0)
    there = {name: factors(tensor) for name, tensor in FACTORS.items() if one.has(tensor)}
    if there:
        one_for_all = there.get("rope_freqs")
        short = there.get("rope_factors_short", one_for_all)
        long = there.get("rope_factors_long", one_for_all)
        scaling = {"short_factor": short, "long_factor": long, "attention_factor": attention}
        return {"rope_scaling": {"rope_type": "longrope", **scaling, **original}, **original}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{one.header.path}: rope.scaling.type {printable(str(kind))} is not read")
    scaling = {"rope_type": kind, "factor": one.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling |= original
        keys = {ours: f"rope.scaling.{theirs}" for theirs, ours in OF_YARN.items()}
        scaling |= {ours: one.number(key) for ours, key in keys.items() if one.get(key) is not None}
    return {"rope_scaling": scaling}


def generation_json(header: Header) -> dict[str, Any]:
    """All tokens that end an answer."""
    found = [header.metadata.get(f"tokenizer.ggml.{name}") for name in END_IDS]
    return {"eos_token_id": sorted({one for one in found if isinstance(one, int)})}


def sentence_files(header: Header) -> dict[str, Any]:
    """How states become embeddings, as sentence-transformers writes it. Empty if the file does not say.

    Raises ConfigError.
    """
    one = Metadata(header, header.metadata["general.architecture"])
    kind = one.get("pooling_type", -1)
    if kind in UNPOOLED:
        return {}
    if kind not in POOLINGS:
        raise ConfigError(f"{header.path}: pooling_type {printable(str(kind))} is not one of 1, 2, 3")
    dense = [number for number in (2, 3) if one.has(f"dense_{number}.weight")]
    folders = ["", "1_Pooling", *(f"{number}_Dense" for number in dense), "4_Normalize"]
    files: dict[str, Any] = {"1_Pooling/config.json": {"pooling_mode": POOLINGS[kind]}}
    for number in dense:
        outputs, inputs = header.tensors[f"dense_{number}.weight"].shape
        layer = {"in_features": inputs, "out_features": outputs, "bias": False}
        files[f"{number}_Dense/config.json"] = layer | {"activation_function": "Identity"}
    kinds = [folder.partition("_")[2] or "Transformer" for folder in folders]
    modules = [{"type": kind, "path": folder} for kind, folder in zip(kinds, folders, strict=True)]
    return {**files, "modules.json": modules}
