"""Builds config.json and generation_config.json from a GGUF file, and the folder that stands for it: links to
its parts, and the files that a checkpoint has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from manylora.checkpoints.gguf import fields as of
from manylora.checkpoints.gguf import names as known
from manylora.checkpoints.gguf.container import NAMED, Header, Metadata, part_name, part_paths, read_parts
from manylora.checkpoints.gguf.fields import POOLINGS
from manylora.checkpoints.gguf.names import NAMES, OUTSIDE, Names
from manylora.checkpoints.gguf.tokenizer import has_tokenizer, tokenizer_config, tokenizer_json
from manylora.errors import ConfigError, printable


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF, and as what config.json names it. fields: further keys of config.json. names,
    outside: of the tensors in and outside of layers. layers: what these are below. eps: the key of the norms'
    epsilon. joined: a checkpoint's tensor -> the file's that have its rows. turned: llama.cpp's converter
    reordered the rows of q and k, so that rotated pairs are neighbours. tiled: a delta rule's value heads are
    in another order, first one for each key head. grouped, delta_grouped: the checkpoint's fused matrix has a
    group of rows for each key head. flipped: its matrices are [in, out]. plus_one: the converter added 1 to
    norms. padded: rows before position 0.
    """

    architecture: str
    fields: Callable[[Metadata], dict[str, Any]] = lambda _: {}
    names: Names = field(default_factory=lambda: NAMES)
    outside: Names = field(default_factory=lambda: OUTSIDE)
    layers: str = "model.layers"
    eps: str = "rms_norm_eps"
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    turned: bool = False
    tiled: bool = False
    delta_grouped: bool = False
    grouped: bool = False
    flipped: bool = False
    plus_one: bool = False
    padded: int = 0


GRANITE_SHARED = {"shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp")}
GRANITE_DENSE = {"shared_mlp.input_linear": ("ffn_gate", "ffn_up")}
DELTA = {"linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate")}
EXPERTS, TWO_NORMS, ROBERTA = " with experts", " with two norms", " with RoBERTa's tokenizer"
BAMBA = " without multipliers"
NEMOTRON_H = Architecture(
    "NemotronHForCausalLM", of.nemotron_h, known.NEMOTRON_H, known.NEMOTRON_H_OUTSIDE,
    eps="layer_norm_epsilon", turned=True,
)  # fmt: skip
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", turned=True),
    "llama" + EXPERTS: Architecture("MixtralForCausalLM", names=known.MIXTRAL, turned=True),
    "mistral3": Architecture("Ministral3ForCausalLM", of.mistral3, turned=True),
    "llama4" + EXPERTS: Architecture("Llama4ForCausalLM", of.llama4, known.LLAMA4),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe" + EXPERTS: Architecture(
        "Qwen2MoeForCausalLM",
        lambda one: {"shared_expert_intermediate_size": of.shared_size(one), "norm_topk_prob": False},
        known.QWEN_MOE,
    ),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe" + EXPERTS: Architecture(
        "Qwen3MoeForCausalLM", lambda _: {"norm_topk_prob": True}, known.QWEN_MOE
    ),
    "qwen3next" + EXPERTS: Architecture(
        "Qwen3NextForCausalLM", of.delta, known.QWEN35, joined=DELTA, delta_grouped=True, plus_one=True
    ),
    "qwen35": Architecture("Qwen3_5ForCausalLM", of.delta, known.QWEN35, tiled=True, plus_one=True),
    "qwen35moe" + EXPERTS: Architecture(
        "Qwen3_5MoeForCausalLM", of.delta, known.QWEN35, tiled=True, plus_one=True
    ),
    "phi2": Architecture(
        "PhiForCausalLM", of.partial, known.PHI2, {**OUTSIDE, "output_norm": "model.final_layernorm"},
        eps="layer_norm_eps",
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        lambda one: {
            **of.partial(one),
            "sliding_window": one.number("attention.sliding_window", 0) or None,
        },
        known.PHI3,
    ),
    "gemma": Architecture("GemmaForCausalLM", plus_one=True),
    "gemma2": Architecture("Gemma2ForCausalLM", of.gemma, known.GEMMA2, plus_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", of.gemma, known.GEMMA2, plus_one=True),
    "gemma-embedding": Architecture(
        "Gemma3TextModel", of.gemma, known.GEMMA2, known.GEMMA_EMBEDDING_OUTSIDE, plus_one=True
    ),
    "gemma3n": Architecture("Gemma3nForCausalLM", of.gemma3n, known.GEMMA3N, known.GEMMA3N_OUTSIDE),
    "gemma4": Architecture("Gemma4ForCausalLM", of.gemma4, known.GEMMA4, known.LAYER_INPUTS_OUTSIDE),
    "gpt-oss" + EXPERTS: Architecture("GptOssForCausalLM", of.gpt_oss, known.GPT_OSS),
    "granite": Architecture("GraniteForCausalLM", of.granite, turned=True),
    "granitemoe" + EXPERTS: Architecture(
        "GraniteMoeForCausalLM", of.granite_moe, known.GRANITE_MOE, joined=GRANITE_SHARED, turned=True
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", of.granite_hybrid, known.GRANITE_HYBRID, joined=GRANITE_DENSE,
        turned=True,
    ),
    "granitehybrid" + EXPERTS: Architecture(
        "GraniteMoeHybridForCausalLM", of.granite_hybrid, known.GRANITE_HYBRID, joined=GRANITE_SHARED,
        turned=True,
    ),
    "granitehybrid" + BAMBA: Architecture(
        "BambaForCausalLM",
        lambda one: {  # half of each head is rotated, whatever the file says
            **of.mamba2(one), "num_key_value_heads": of.attended_heads(one),
            "attn_layer_indices": [n for n in range(one.layers) if one.has(f"blk.{n}.attn_q.weight")],
        },
        known.BAMBA, known.BAMBA_OUTSIDE, turned=True,
    ),
    "falcon-h1": Architecture("FalconH1ForCausalLM", of.falcon_h1, known.FALCON_H1, known.BAMBA_OUTSIDE),
    "olmo2": Architecture("Olmo2ForCausalLM", of.olmo2, known.POST_NORM),
    "olmoe" + EXPERTS: Architecture(
        "OlmoeForCausalLM", lambda _: {"norm_topk_prob": False}, known.QWEN_MOE
    ),
    "exaone4": Architecture(
        "Exaone4ForCausalLM", lambda one: {"sliding_window": None, **of.pattern(one)}, known.POST_NORM
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", turned=True),
    "lfm2": Architecture("Lfm2ForCausalLM", of.lfm2, known.LFM2, known.LFM2_OUTSIDE, eps="norm_eps"),
    "lfm2moe" + EXPERTS: Architecture(
        "Lfm2MoeForCausalLM", of.lfm2_moe, known.LFM2, known.LFM2_OUTSIDE, eps="norm_eps"
    ),
    "command-r": Architecture(
        "CohereForCausalLM",
        lambda one: {
            "logit_scale": one.number("logit_scale"),
            "use_qk_norm": one.in_any("attn_q_norm.weight"),
        },
        eps="layer_norm_eps",
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        lambda one: {"logit_scale": one.number("logit_scale"), **of.pattern(one)},
        eps="layer_norm_eps",
    ),
    "deepseek2" + EXPERTS: Architecture("DeepseekV3ForCausalLM", of.deepseek2, known.DEEPSEEK),
    "chatglm": Architecture("GlmForCausalLM", of.partial, known.GLM),
    "glm4": Architecture("Glm4ForCausalLM", of.partial, known.GLM4),
    "glm4moe" + EXPERTS: Architecture(
        "Glm4MoeForCausalLM",
        lambda one: {
            **of.routed(one), **of.partial(one), "use_qk_norm": one.in_any("attn_q_norm.weight"),
        },
        known.GLM4_MOE,
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe" + EXPERTS: Architecture("Ernie4_5_MoeForCausalLM", of.ernie_moe, known.ERNIE_MOE),
    "nemotron": Architecture("NemotronForCausalLM", of.partial, eps="norm_eps", plus_one=True),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe" + EXPERTS: NEMOTRON_H,
    "stablelm": Architecture("StableLmForCausalLM", of.stablelm, known.STABLELM, eps="layer_norm_eps"),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", lambda _: {"sliding_window": None}, known.STARCODER2, eps="norm_epsilon"
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel", lambda one: {"n_inner": one.inner_size}, known.GPT2,
        known.GPT2_OUTSIDE, "transformer.h", "layer_norm_epsilon", flipped=True,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM", of.neox, known.NEOX, known.NEOX_OUTSIDE, "gpt_neox.layers", "layer_norm_eps",
        grouped=True,
    ),
    "falcon": Architecture(
        "FalconForCausalLM", of.falcon, known.FALCON, known.FALCON_OUTSIDE, "transformer.h",
        "layer_norm_epsilon", grouped=True,
    ),
    "bert": Architecture(
        "BertModel", of.bert, known.BERT, known.BERT_OUTSIDE, "encoder.layer", "layer_norm_eps"
    ),
    "bert" + ROBERTA: Architecture(
        "XLMRobertaModel", of.roberta, known.BERT, known.ROBERTA_OUTSIDE, "encoder.layer", "layer_norm_eps",
        padded=of.ROBERTA_PADDING + 1,
    ),
    "nomic-bert": Architecture(
        "NomicBertModel", lambda one: of.bert(one, "NomicBert", "nomic_bert"), known.NOMIC_BERT,
        known.NOMIC_BERT_OUTSIDE, "encoder.layers", "layer_norm_eps",
    ),
    "modern-bert": Architecture(
        "ModernBertModel", of.modern_bert, known.MODERN_BERT, known.MODERN_BERT_OUTSIDE, eps="norm_eps"
    ),
}  # fmt: skip
"""By `general.architecture`, and separately with experts."""
ARCHITECTURES["gemma4" + EXPERTS] = ARCHITECTURES["gemma4"]
ARCHITECTURES["falcon" + TWO_NORMS] = replace(ARCHITECTURES["falcon"], names=known.FALCON_TWO_NORMS)


def architecture_of(header: Header) -> Architecture:
    """Raises ConfigError for a file that is not a base model, or has another architecture."""
    kind = header.metadata.get("general.architecture")
    if header.metadata.get("general.type", "model") != "model":
        found = printable(str(header.metadata["general.type"]))
        raise ConfigError(f"{header.path} holds no base model: its general.type is {found}")
    variant = TWO_NORMS if kind == "falcon" and "blk.0.attn_norm_2.weight" in header.tensors else ""
    if kind == "bert" and header.metadata.get("tokenizer.ggml.model", "bert") != "bert":
        variant = ROBERTA
    elif kind == "granitehybrid" and "granitehybrid.embedding_scale" not in header.metadata:
        variant = BAMBA
    name = f"{kind}{EXPERTS if header.metadata.get(f'{kind}.expert_count') else variant}"
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{header.path}: GGUF architecture {printable(name)} is not read; read are "
            f"{', '.join(ARCHITECTURES)}: give the original model, a folder with model.safetensors"
        )
    return ARCHITECTURES[name]


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
        **of.common(one),
        **fields,
    }
    if "num_key_value_heads" not in made:
        made["num_key_value_heads"] = one.number("attention.head_count_kv", one.heads)
    if "rope_parameters" in made:
        return made
    scaling, more = _scaling(one, factors), fields.get("rope_scaling")
    made |= scaling
    if more is not None and scaling:
        made["rope_scaling"] = scaling["rope_scaling"] | more
    elif more is not None:  # without one in the file, the architecture's default is not used
        made |= {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}
    return made


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


def sentence_files(header: Header) -> dict[str, Any]:
    """How states become embeddings, as sentence-transformers writes it. Empty if the file does not say."""
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


LINK = "model.gguf"
VERSION = 3  # version of a folder's contents
MOST_FACTORS = 2**12


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, or the name of a part of one."""
    return path.suffix.lower() == ".gguf" and (path.is_file() or NAMED.fullmatch(path.stem) is not None)


def linked_files(folder: Path) -> list[Path]:
    """The links to a GGUF file's parts in the folder that stands for it. Empty for any other folder."""
    whole = folder / LINK
    return [whole] if whole.is_file() else sorted(folder.glob("model-*-of-*.gguf"))


def gguf_folder(path: Path) -> Path:
    """The folder of a GGUF file, or of the file that `path` is a part of, in `~/.cache/manylora/gguf`.
    Created if necessary. A changed file gets another folder. Raises ConfigError.
    """
    parts = part_paths(path.absolute())
    files = [part.resolve() for part in parts]
    named = f"{VERSION}"
    for file in files:
        stat = file.stat()
        named += f" {file} {stat.st_size} {stat.st_mtime_ns}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manylora" / "gguf"
    folder = base / f"{parts[0].stem}-{hashlib.blake2b(named.encode(), digest_size=8).hexdigest()}"
    if (folder / "config.json").is_file():
        return folder
    texts = _texts(read_parts(parts[0]))
    count = len(files)
    links = [LINK] if count == 1 else [part_name("model", one, count) for one in range(1, count + 1)]
    try:
        base.mkdir(parents=True, exist_ok=True)
        _make(base, folder, texts, dict(zip(links, files, strict=True)))
    except OSError as error:
        raise ConfigError(
            f"{path}: a folder for its tokenizer cannot be made in {base}: {error.strerror}; XDG_CACHE_HOME "
            "names another place"
        ) from error
    return folder


def _make(base: Path, folder: Path, texts: dict[str, str], links: dict[str, Path]) -> None:
    """Create all of it, or nothing. Raises OSError."""
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=base))
    try:
        made.chmod(0o755)
        for name, text in texts.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(text, encoding="utf-8")
        for name, file in links.items():
            (made / name).symlink_to(file)
        made.rename(folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (folder / "config.json").is_file():  # otherwise another process was faster
            raise


def _texts(header: Header) -> dict[str, str]:
    ends = {header.metadata.get(f"tokenizer.ggml.{name}") for name in END_IDS}
    found: dict[str, Any] = {
        "config.json": config_json(header, lambda name: _factors(header, name)),
        "generation_config.json": {"eos_token_id": sorted(one for one in ends if isinstance(one, int))},
        **sentence_files(header),
    }
    if has_tokenizer(header):
        found |= {"tokenizer.json": tokenizer_json(header), "tokenizer_config.json": tokenizer_config(header)}
    return {name: json.dumps(content, ensure_ascii=False) for name, content in found.items()}


def _factors(header: Header, name: str) -> list[float]:
    info = header.tensors[name]
    if info.kind != "F32" or len(info.shape) != 1 or info.shape[0] > MOST_FACTORS:
        raise ConfigError(
            f"{header.path}: {name} must be a vector of F32, got {info.kind} {list(info.shape)}"
        )
    with part_paths(header.path)[info.part].open("rb") as file:
        file.seek(info.offset)
        return np.frombuffer(file.read(info.nbytes), dtype="<f4").tolist()
