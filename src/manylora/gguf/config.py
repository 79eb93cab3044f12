"""Builds config.json, generation_config.json and the usual tensor names from a GGUF file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manylora.errors import ConfigError, printable
from manylora.gguf.container import Header

DTYPES = {"F32": "float32", "BF16": "bfloat16"}
LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
GEMMA2 = {
    **NAMES, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
# Factors of rotary frequencies, which become part of the configuration.
FACTORS = {name: f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")}
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
LARGEST_GEMMAS = {
    "gemma2": 46,
    "gemma3": 62,
}  # layers of those whose queries are scaled by hidden size over heads


@dataclass(frozen=True)
class GgufFamily:
    """One architecture of GGUF.

    architecture: in config.json. fields: further keys of config.json. turned: llama.cpp's converter reordered
    the rows of q and k, so that pairs of rotated dimensions are neighbours. plus_one: it added 1 to norms.
    """

    architecture: str
    fields: Callable[[_Metadata], dict[str, Any]] = lambda _: {}
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    turned: bool = False
    plus_one: bool = False


@dataclass(frozen=True)
class _Metadata:
    """The keys of one architecture."""

    header: Header
    kind: str

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.kind}.{name}", default)

    def number(self, name: str, default: float | None = None) -> Any:
        """Raises ConfigError unless it is one number, or the same number for every layer."""
        found = self.get(name, default)
        if hasattr(found, "tolist"):
            values = set(found.tolist())
            found = values.pop() if len(values) == 1 else "different ones for its layers"
        if isinstance(found, bool) or not isinstance(found, int | float):
            key = f"{self.kind}.{name}"
            raise ConfigError(
                f"{self.header.path}: metadata {key} must be a number, got {printable(str(found))}"
            )
        return found

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    @property
    def head_dim(self) -> int:
        usual = self.number("embedding_length") // max(1, self.number("attention.head_count"))
        found = self.number("attention.key_length", usual)
        if not isinstance(found, int) or found < 1:
            raise ConfigError(f"{self.header.path}: metadata says that a head has {found} dimensions")
        return found


def _llama(one: _Metadata) -> dict[str, Any]:
    return {"attention_bias": one.has("blk.0.attn_q.bias"), "mlp_bias": one.has("blk.0.ffn_up.bias")}


def _phi3(one: _Metadata) -> dict[str, Any]:
    return {
        "partial_rotary_factor": one.number("rope.dimension_count", one.head_dim) / one.head_dim,
        "sliding_window": one.number("attention.sliding_window", 0) or None,
    }


def _gemma(one: _Metadata) -> dict[str, Any]:
    heads, size = one.number("attention.head_count"), one.number("embedding_length")
    largest = LARGEST_GEMMAS.get(one.kind) == one.number("block_count")
    fields = {"query_pre_attn_scalar": size // heads if largest else one.head_dim}
    if one.kind == "gemma":
        return {}
    if one.get("attention.sliding_window") is not None:
        fields["sliding_window"] = one.number("attention.sliding_window")
    pattern = one.get("attention.sliding_window_pattern")
    if hasattr(pattern, "tolist"):
        fields["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern.tolist()]
    elif pattern is not None:
        fields["sliding_window_pattern"] = one.number("attention.sliding_window_pattern")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields[name] = one.number(name, 0) or None
    if one.kind == "gemma3":
        fields["rope_local_base_freq"] = one.number("rope.freq_base_swa", 10000.0)
    return fields


FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", _llama, turned=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "phi3": GgufFamily("Phi3ForCausalLM", _phi3, {**NAMES, "ffn_up": "mlp.gate_up_proj"}),
    "gemma": GgufFamily("GemmaForCausalLM", _gemma, plus_one=True),
    "gemma2": GgufFamily("Gemma2ForCausalLM", _gemma, GEMMA2, plus_one=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", _gemma, GEMMA2, plus_one=True),
}
"""By `general.architecture`."""


def family_of(header: Header) -> GgufFamily:
    """Raises ConfigError for a file that is not a base model, or has another architecture."""
    kind = header.metadata.get("general.architecture")
    if header.metadata.get("general.type", "model") != "model":
        found = printable(str(header.metadata["general.type"]))
        raise ConfigError(f"{header.path} holds no base model: its general.type is {found}")
    if kind not in FAMILIES or header.metadata.get(f"{kind}.expert_count"):
        name = printable(str(kind)) + (" with experts" if kind in FAMILIES else "")
        raise ConfigError(
            f"{header.path}: GGUF architecture {name} is not read; read are {', '.join(FAMILIES)}: give the "
            "original model, a folder with model.safetensors"
        )
    return FAMILIES[kind]


def tensor_name(name: str, family: GgufFamily) -> str:
    """A tensor's name in a Hugging Face checkpoint. Its own name if there is no other."""
    stem, _, end = name.rpartition(".")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{end}"
    found = LAYER.fullmatch(name)
    if found is None or found[2] not in family.names:
        return name
    return f"model.layers.{int(found[1])}.{family.names[found[2]]}.{end}"


def config_json(header: Header, factors: Callable[[str], list[float]]) -> dict[str, Any]:
    """factors: reads a small tensor. Raises ConfigError."""
    family = family_of(header)
    one = _Metadata(header, header.metadata["general.architecture"])
    layers = one.number("block_count")
    if not 1 <= layers <= len(header.tensors):
        raise ConfigError(
            f"{header.path}: metadata {one.kind}.block_count is {layers}, which its tensors are not"
        )
    embed = header.tensors.get("token_embd.weight")
    if embed is None:
        raise ConfigError(f"{header.path} lacks the tensor token_embd.weight")
    heads = one.number("attention.head_count")
    kept = Counter[str]()
    for tensor in header.tensors.values():
        kept[tensor.kind] += tensor.nbytes
    return {
        "architectures": [family.architecture],
        "vocab_size": embed.shape[0],
        "hidden_size": one.number("embedding_length"),
        "intermediate_size": one.number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": one.number("attention.head_count_kv", heads),
        "head_dim": one.head_dim,
        "max_position_embeddings": one.number("context_length"),
        "rms_norm_eps": one.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": one.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": not one.has("output.weight"),
        "dtype": DTYPES.get(kept.most_common(1)[0][0], "float16"),
        **family.fields(one),
        **_scaling(one, factors),
    }


def _scaling(one: _Metadata, factors: Callable[[str], list[float]]) -> dict[str, Any]:
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
    factor = one.number("rope.scaling.factor")
    scaling = {"rope_type": kind, "factor": factor}
    return {"rope_scaling": scaling | original if kind == "yarn" else scaling}


def generation_json(header: Header) -> dict[str, Any]:
    """All tokens that end an answer."""
    found = [header.metadata.get(f"tokenizer.ggml.{name}") for name in END_IDS]
    return {"eos_token_id": sorted({one for one in found if isinstance(one, int)})}
