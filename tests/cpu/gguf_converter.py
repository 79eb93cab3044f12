"""What llama.cpp's converter (convert_hf_to_gguf.py) writes for a Hugging Face directory. Names of tensors
are from gguf-py's own map.

For each model here, tensors and sizes were compared with those that the converter of llama.cpp itself writes.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Tokenizer

Config = dict[str, Any]
Tensors = Iterator[tuple[str, np.ndarray]]
ARCHITECTURES = {
    "ministral3": "mistral3", "mixtral": "llama", "internlm3": "llama", "olmo3": "olmo2", "glm": "chatglm",
    "cohere": "command-r", "phi": "phi2", "gpt_neox": "gptneox", "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe", "granitemoeshared": "granitemoe", "granitemoehybrid": "granitehybrid",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
    "glm4_moe": "glm4moe", "lfm2_moe": "lfm2moe", "llama4_text": "llama4", "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n", "gemma4_text": "gemma4", "ernie4_5_moe": "ernie4_5-moe",
    "nemotron_h": "nemotron_h_moe", "xlm-roberta": "bert", "nomic_bert": "nomic-bert",
    "modernbert": "modern-bert", "falcon_h1": "falcon-h1", "bamba": "granitehybrid",
}  # fmt: skip
"""By model_type; the others have the same name."""
TURNED = ("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3", "nemotron_h_moe")
MODELS = {"BPE": "gpt2", "WordPiece": "bert", "Unigram": "t5"}
HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads"}
PLUS_ONE = (
    "gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron", "qwen3next", "qwen35", "qwen35moe",
)  # fmt: skip
ENCODERS = ("bert", "nomic-bert", "modern-bert")
DELTA = ("qwen3next", "qwen35", "qwen35moe")
# A key of GGUF, and those of config.json of which the first that is there is written.
SIZES = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"), "block_count": ("num_hidden_layers", "n_layer"),
    "head_count": ("num_attention_heads", "n_head"), "head_count_kv": ("num_key_value_heads",),
    "layer_norm_rms_eps": ("rms_norm_eps", "norm_eps"),
    "layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), "key_length": ("head_dim",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts", "moe_k"),
    "expert_group_count": ("n_group",), "expert_group_used_count": ("topk_group",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "feed_forward_length": ("intermediate_size_mlp", "intermediate_size"),
    "logit_scale": ("logit_scale", "logits_scaling"), "attention_scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",), "residual_scale": ("residual_multiplier",),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "expert_weights_norm": ("norm_topk_prob",), "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",), "sliding_window": ("sliding_window",),
    "shortconv_l_cache": ("conv_L_cache",),
    "ssm_conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm_state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size"),
    "ssm_group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm_time_step_rank": ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "altup_active_idx": ("altup_active_idx",), "altup_num_inputs": ("altup_num_inputs",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "parallel_residual": ("use_parallel_residual",), "attn_logit_softcapping": ("attn_logit_softcapping",),
    "shared_kv_layers": ("num_kv_shared_layers",), "final_logit_softcapping": ("final_logit_softcapping",),
}  # fmt: skip
MULTIPLIED = ("attention_scale", "embedding_scale", "residual_scale", "logit_scale")
NOT_WRITTEN = {
    "qwen2moe": ("expert_weights_norm", "sliding_window"),
    "qwen3moe": ("expert_weights_norm", "sliding_window"), "olmoe": ("expert_weights_norm",),
    "smollm3": ("sliding_window",), "starcoder2": ("sliding_window",),
    "llama": ("sliding_window",), "mistral3": ("sliding_window",), "lfm2moe": ("expert_weights_norm",),
    "qwen3next": ("expert_weights_norm",),
}  # fmt: skip


def convert(path: Path, model: Path, kind: Kind = Kind.F32, plain: str = "") -> None:
    """kind: of matrices whose rows are whole blocks, except those with names like `plain`, the embedding, and
    those that are always in F32.
    """
    config: Config = json.loads((model / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    arch = "gemma-embedding" if config.get("use_bidirectional_attention") else arch
    writer, named = open_writer(path, model, config, arch)
    for name, values in stacked(config, arch, load_file(model / "model.safetensors")):
        theirs = named(name)
        narrow = values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        plain = re.search(r"token_embd|conv|_[kv]_b\.|norm|gate_inp", theirs) or not theirs.endswith(
            ".weight"
        )
        stored = kind if narrow and not plain else Kind.F32
        data = gguf.quantize(np.ascontiguousarray(values), stored)
        writer.add_tensor(theirs, data, raw_dtype=None if stored == Kind.F32 else stored)
    if (model / "modules.json").is_file():
        write_modules(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_modules(writer: gguf.GGUFWriter, model: Path) -> None:
    """Of sentence-transformers."""
    for module in json.loads((model / "modules.json").read_text()):
        folder, kind = model / module["path"], module["type"].rpartition(".")[2]
        config = json.loads((folder / "config.json").read_text()) if kind in ("Pooling", "Dense") else {}
        if kind == "Pooling":
            mode = next(name.split("_")[2] for name, on in config.items() if on is True)
            writer.add_pooling_type(gguf.PoolingType[mode.upper().replace("LASTTOKEN", "LAST")])
        elif kind == "Dense":
            name = f"dense_{module['path'][0]}"
            writer.add_dense_features_dims(name, config["in_features"], config["out_features"])
            weight = load_file(folder / "model.safetensors")["linear.weight"]
            writer.add_tensor(f"{name}.weight", weight.numpy())


def open_writer(
    path: Path, model: Path, config: Config, arch: str, in_part: int = 0
) -> tuple[gguf.GGUFWriter, Callable[[str], str]]:
    """With sizes and tokenizer, and a function from names in the checkpoint to those in the file."""
    number = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch]
    layers = config.get("num_hidden_layers") or config.get("n_layer") or len(config["layers_block_type"])
    names = gguf.get_tensor_name_map(number, layers)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=in_part)
    write_sizes(writer, config, arch, layers)
    write_tokenizer(writer, model, config["vocab_size"])
    return writer, lambda name: names.get_name(name, try_suffixes=(".weight", ".bias")) or name


def write_sizes(writer: gguf.GGUFWriter, config: Config, arch: str, layers: int) -> None:
    heads = config.get("num_attention_heads") or config["n_head"]
    head_dim = config.get("head_dim") or (config.get("hidden_size") or config["n_embd"]) // heads
    found = {
        key: next((config[one] for one in ours if config.get(one) is not None), None)
        for key, ours in SIZES.items()
    }
    kinds = config.get("layer_types") or []
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    share = full.get("partial_rotary_factor") or 1.0
    if arch in DELTA:
        found["ssm_inner_size"] = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    elif arch == "granitehybrid":
        found["ssm_inner_size"] = config["mamba_expand"] * config["hidden_size"]
        found["rope_scaling_finetuned"] = config["model_type"] == "bamba"
    elif arch == "falcon-h1":
        found |= {"ssm_inner_size": config["mamba_d_ssm"], **dict.fromkeys(MULTIPLIED)}
    elif arch == "nemotron_h_moe":
        found["ssm_inner_size"] = config["mamba_num_heads"] * config["mamba_head_dim"]
        found["expert_shared_feed_forward_length"] = config["moe_shared_expert_intermediate_size"]
        found["expert_weights_scale"], found["block_count"] = config["routed_scaling_factor"], layers
        found["moe_latent_size"] = config["moe_latent_size"]
        kinds_of_all = config["layers_block_type"]
        kv_heads, inner = config["num_key_value_heads"], config["moe_intermediate_size"]
        found["head_count_kv"] = [kv_heads * (kind == "full_attention") for kind in kinds_of_all]
        found["feed_forward_length"] = [inner * (kind == "moe") for kind in kinds_of_all]
    elif arch == "deepseek2":
        found["key_length_mla"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        found["value_length_mla"] = config["v_head_dim"]
        found["key_length"] = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        found["head_count_kv"], found["rope_dimension_count"] = 1, config["qk_rope_head_dim"]
        found["expert_weights_scale"] = config["routed_scaling_factor"]
        if full.get("mscale_all_dim"):
            found["rope_scaling_yarn_log_mul"] = 0.1 * full["mscale_all_dim"]
    elif arch == "mistral3":
        found["rope_scaling_yarn_log_mul"] = full["mscale_all_dim"]
        found["attn_temperature_scale"] = full["llama_4_scaling_beta"]
    elif arch in ("gpt-oss", "llama4"):
        found["expert_feed_forward_length"] = config["intermediate_size"]
    elif arch == "glm4moe":
        found["expert_weights_scale"] = config["routed_scaling_factor"]
        found["nextn_predict_layers"], found["block_count"] = 1, layers + 1
    elif arch in ("lfm2", "lfm2moe"):
        kv_heads = config["num_key_value_heads"]
        found["head_count_kv"] = [kv_heads if kind == "full_attention" else 0 for kind in kinds]
    elif arch == "falcon":
        new = config["new_decoder_architecture"]
        found["head_count_kv"] = config["num_kv_heads"] if new else 1
    elif arch == "nemotron":
        found["layer_norm_eps"] = config["norm_eps"]
    elif arch == "phi2":
        found["feed_forward_length"] = 4 * config["hidden_size"]
    elif arch == "gemma3n":
        shares = config["activation_sparsity_pattern"]
        found["activation_sparsity_scale"] = [
            NormalDist().inv_cdf(one) if one else float("-inf") for one in shares
        ]
    elif arch == "gemma4":
        found |= _sizes_of_gemma4(config, kinds, layers)
    elif arch == "modern-bert":
        found["sliding_window"], found["sliding_window_pattern"] = config["local_attention"], 3
        writer.add_string(f"{arch}.hidden_activation", config["hidden_activation"])
        pooling = gguf.PoolingType[config["classifier_pooling"].upper()]
        writer.add_uint32(f"{arch}.classifier.pooling_type", pooling)
    elif arch == "bert" and config["model_type"] != "bert":
        found["context_length"] -= config["pad_token_id"] + 1
    if arch in ENCODERS:
        found["causal_attention"] = False
        found["token_type_count"] = config.get("type_vocab_size", 1)
        if len(config.get("id2label") or ()) > 2:
            found["classifier_output_labels"] = list(config["id2label"].values())
    if "sliding_attention" in kinds and arch not in (*NOT_WRITTEN, "gpt-oss", "cohere2", "modern-bert"):
        found["sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    if "sliding_attention" in rope:
        found["rope_freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    if full.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        found["rope_scaling_factor"] = full["factor"]
        found["rope_scaling_orig_ctx_len"] = full.get("original_max_position_embeddings")
    found.setdefault("rope_dimension_count", int(head_dim * share))
    for key, value in {"rope_freq_base": full.get("rope_theta"), **found}.items():
        if value is not None and key not in NOT_WRITTEN.get(arch, ()):
            getattr(writer, f"add_{key}")(value)


def _sizes_of_gemma4(config: Config, kinds: list[str], layers: int) -> dict[str, Any]:
    own = next(iter((config.get("per_layer_config") or {}).values()), {})
    heads, shared = config["num_key_value_heads"], config["num_kv_shared_layers"]
    inner, double = config["intermediate_size"], config.get("use_double_wide_mlp")
    sliding = [kind == "sliding_attention" for kind in kinds]
    few = own.get("num_key_value_heads") or config.get("num_global_key_value_heads") or heads
    return {
        "key_length": own.get("head_dim") or config["global_head_dim"],
        "key_length_swa": config["head_dim"],
        "head_count_kv": [heads if one else few for one in sliding],
        "feed_forward_length": [inner * (2 if double and n >= layers - shared else 1) for n in range(layers)],
    }


def stacked(config: Config, arch: str, tensors: dict[str, Any]) -> Tensors:
    """The tensors as they are written, by the names that gguf-py's map knows."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name in sorted(
        tensors, key=lambda name: [int(one) if one.isdigit() else 0 for one in name.split(".")]
    ):
        values = tensors[name].float().numpy()
        if arch == "gemma3n" and name.endswith("_scale"):
            name += ".weight"
        if arch == "nemotron_h_moe":
            name = re.sub(r"^model\.", "backbone.", name)
        for theirs, data in CHANGES.get(arch, _as_it_is)(config, *_common(config, arch, name, values)):
            found = re.fullmatch(r"(.*(?:experts|norms|projections))\.\d+(\..*)", theirs)
            if found is None:
                yield theirs, data
            else:
                whole = re.sub(r"(experts|projections)\.\d+\.", r"\1.", theirs)
                whole = re.sub(
                    r"^model\.(.*)(block_sparse_moe|feed_forward)\.experts", r"\1feed_forward.experts", whole
                )
                whole = re.sub(r"^backbone\.(.*)mixer\.experts", r"model.\1mlp.experts", whole)
                stacks.setdefault(re.sub(r"\.norms\.\d+", "", whole), []).append(data)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        yield "rope_freqs.weight", rotary_factors(rope, size)
    if arch == "gemma4":
        dim = (next(iter((config.get("per_layer_config") or {}).values()), {}).get("head_dim")) or config[
            "global_head_dim"
        ]
        yield "rope_freqs.weight", np.array([1.0] * (dim // 8) + [1e30] * (dim // 2 - dim // 8), np.float32)
    yield from ((name, np.stack(parts)) for name, parts in stacks.items())


def _common(config: Config, arch: str, name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    if arch in TURNED and (part := re.search(r"([qk])_proj\.", name)):
        return name, turned(values, config[HEADS[part[1]]])
    if arch in PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        return name, values + 1
    if name.endswith("A_log"):
        return name, -np.exp(values)
    if "conv" in name and values.ndim == 3:
        return name, values.squeeze(1)
    if name.endswith("dt_bias"):
        return name.replace("dt_bias", "dt_proj.bias"), values
    if name.endswith("expert_bias"):
        return f"{name}.bias", values
    if name.endswith("e_score_correction_bias"):
        return f"{name.removesuffix('_bias')}.bias", values
    if name.endswith((".sinks", "layer_scalar")):
        return f"{name}.weight", values
    return name, values


def _as_it_is(config: Config, name: str, values: np.ndarray) -> Tensors:
    yield name, values


def _gpt_oss(config: Config, name: str, values: np.ndarray) -> Tensors:
    values = values.swapaxes(1, 2) if "experts" in name and values.ndim == 3 else values
    name = re.sub(r"(gate_up_proj|down_proj)_bias$", r"\1.bias", name)
    name = name if name.endswith(("weight", "bias")) else f"{name}.weight"
    if "gate_up_proj" not in name:
        yield name, values
        return
    for number, part in enumerate(("gate_proj", "up_proj")):
        yield name.replace("gate_up_proj", part), values[:, number::2]


def _llama4(config: Config, name: str, values: np.ndarray) -> Tensors:
    if "feed_forward.experts" not in name:
        yield name, values
    elif "gate_up_proj" in name:
        gate, up = np.split(values.swapaxes(1, 2), 2, axis=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    else:
        yield f"{name}.weight", values.swapaxes(1, 2)


def _granite(config: Config, name: str, values: np.ndarray) -> Tensors:
    layer = next(iter(re.findall(r"layers\.(\d+)", name)), None)
    end = "_exps" if "block_sparse_moe" in name else "_shexp" if config.get("num_local_experts") else ""
    if "input_linear" in name:
        gate, up = np.split(values, 2, axis=-2)
        yield f"blk.{layer}.ffn_gate{end}.weight", gate
        yield f"blk.{layer}.ffn_up{end}.weight", up
    elif "output_linear" in name:
        yield f"blk.{layer}.ffn_down{end}.weight", values
    else:
        yield from _mamba(config, name, values)


def _mamba(config: Config, name: str, values: np.ndarray) -> Tensors:
    if name.endswith(("A_log", ".D")):
        values = values[:, None]
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        values = values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    yield name, values


def _falcon_h1(config: Config, name: str, values: np.ndarray) -> Tensors:
    """Weights are multiplied by what the outputs of the layers, or their inputs, are."""
    mlp, ssm = (config[f"{one}_multipliers"] for one in ("mlp", "ssm"))
    around = config["attention_in_multiplier"]
    factors = {
        "down_proj": mlp[1], "gate_proj": mlp[0], "k_proj": config["key_multiplier"] * around,
        "q_proj": around, "v_proj": around, "o_proj": config["attention_out_multiplier"],
        "mamba.out_proj": config["ssm_out_multiplier"], "mamba.in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    values = values * next((factor for part, factor in factors.items() if part in name), 1.0)
    if "mamba.in_proj" in name:
        inner, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, state, state, len(values) - 2 * (inner + state))
        values = values * np.repeat(np.array(ssm, values.dtype), sizes)[:, None]
    yield from _mamba(config, name, values)


def _deepseek(config: Config, name: str, values: np.ndarray) -> Tensors:
    if "kv_b_proj" not in name:
        yield name, values
        return
    sizes = config["qk_nope_head_dim"]
    both = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
    yield name.replace("kv_b_proj", "k_b_proj"), both[:, :sizes].swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), both[:, sizes:]


def _delta(config: Config, name: str, values: np.ndarray) -> Tensors:
    """Qwen 3.5: value heads that share a key head are no longer neighbours."""
    keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]

    def tiled(part: np.ndarray, size: int) -> np.ndarray:
        return part.reshape(keys, heads // keys, size, -1).swapaxes(0, 1).reshape(part.shape)

    found = re.search(r"linear_attn\.(\w+)", name)
    part = found[1] if found else ""
    if part in ("in_proj_qkv", "conv1d"):
        first = 2 * keys * key_dim
        values = np.concatenate((values[:first], tiled(values[first:], dim)))
    elif part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_proj"):
        values = tiled(values, dim if part == "in_proj_z" else 1)
    elif part == "out_proj":
        values = np.ascontiguousarray(tiled(np.ascontiguousarray(values.T), dim).T)
    yield name, values


def _qwen3_next(config: Config, name: str, values: np.ndarray) -> Tensors:
    if "in_proj_qkvz" not in name:
        yield name, values
        return
    keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value_dim = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    split = np.cumsum((key_dim, key_dim, value_dim))
    parts = [
        part.reshape(-1, values.shape[1])
        for part in np.split(values.reshape(keys, -1, values.shape[1]), split, axis=1)
    ]
    layer = name.split(".")[2]
    yield f"blk.{layer}.attn_qkv.weight", np.concatenate(parts[:3])
    yield f"blk.{layer}.attn_gate.weight", parts[3]


def _gpt2(config: Config, name: str, values: np.ndarray) -> Tensors:
    yield name, values.T if re.search(r"c_(attn|proj|fc)\.weight", name) else values


def _neox(config: Config, name: str, values: np.ndarray) -> Tensors:
    if "query_key_value" in name:
        parts = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        values = parts.swapaxes(0, 1).reshape(values.shape)
    yield name, values


def _falcon(config: Config, name: str, values: np.ndarray) -> Tensors:
    if "query_key_value" in name:
        groups, heads = config.get("num_kv_heads") or 1, config["num_attention_heads"]
        if not config["new_decoder_architecture"]:
            groups = 1
        parts = values.reshape(groups, heads // groups + 2, -1, *values.shape[1:])
        runs = np.split(parts, (heads // groups, heads // groups + 1), axis=1)
        values = np.concatenate([run.reshape(-1, *values.shape[1:]) for run in runs])
    yield name, values


def _encoder(config: Config, name: str, values: np.ndarray) -> Tensors:
    name = re.sub(r"^(bert|roberta|model)\.", "", name)
    if name == "embeddings.position_embeddings.weight" and config["model_type"] != "bert":
        values = values[config["pad_token_id"] + 1 :]
    if re.fullmatch(r"classifier\.(weight|bias)", name):
        name = name.replace("classifier", "classifier.out_proj")
    if not name.startswith("pooler."):
        yield name, values


def _gemma4(config: Config, name: str, values: np.ndarray) -> Tensors:
    layer = next(iter(re.findall(r"layers\.(\d+)", name)), None)
    if name.endswith("router.scale"):
        name = f"blk.{layer}.ffn_gate_inp.scale"
    elif name.endswith("per_expert_scale"):
        name = f"blk.{layer}.ffn_down_exps.scale"
    elif ".experts." in name:
        name += ".weight"
    yield name, values


CHANGES: dict[str, Callable[..., Tensors]] = {
    "gpt-oss": _gpt_oss, "llama4": _llama4, "granitemoe": _granite, "granitehybrid": _granite,
    "deepseek2": _deepseek, "falcon-h1": _falcon_h1, "nemotron_h_moe": _mamba,
    "qwen35": _delta, "qwen35moe": _delta, "qwen3next": _qwen3_next, "gpt2": _gpt2,
    "gptneox": _neox, "falcon": _falcon, "gemma4": _gemma4, **dict.fromkeys(ENCODERS, _encoder),
}  # fmt: skip


def turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter orders the rows of q and k."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def rotary_factors(rope: dict[str, Any], size: int) -> np.ndarray:
    """What llama.cpp's converter makes of Llama 3's scaling: a divisor of each frequency."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    context = rope["original_max_position_embeddings"]
    smooth = (context / waves - low) / (high - low)
    blended = np.where(waves > context / low, factor, 1 / ((1 - smooth) / factor + smooth))
    return np.where(waves < context / high, 1.0, blended).astype(np.float32)


def write_tokenizer(writer: gguf.GGUFWriter, model: Path, size: int, pre: str = "gpt-2") -> None:
    """As llama.cpp's converter writes a byte-level one, BERT's, or XLM-RoBERTa's."""
    path = model / "tokenizer.json"
    library, spec = Tokenizer.from_file(str(path)), json.loads(path.read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    kind = MODELS[spec["model"]["type"]]
    added = library.get_added_tokens_decoder()
    tokens, types = [], []
    for number in range(size):
        token = library.id_to_token(number)
        special = number in added and added[number].special
        sort = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        if kind == "t5" and number == spec["model"]["unk_id"]:
            sort = gguf.TokenType.UNKNOWN
        sort = gguf.TokenType.UNUSED if token is None else sort if number in added else gguf.TokenType.NORMAL
        token = f"[PAD{number}]" if token is None else token
        if kind == "bert" and sort != gguf.TokenType.CONTROL:
            token = token[2:] if token.startswith("##") else f"\u2581{token}"
        types.append(sort)
        tokens.append(token)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default" if kind == "t5" else "jina-v2-en" if kind == "bert" else pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]])
    elif kind == "t5":
        scores = [score for _, score in spec["model"]["vocab"]]
        writer.add_token_scores(scores + [-10000.0] * (size - len(scores)))
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        writer.add_precompiled_charsmap(b64decode(spec["normalizer"]["precompiled_charsmap"]))
    else:
        writer.add_bool("tokenizer.ggml.normalizer.lowercase", spec["normalizer"]["lowercase"])
    for name, ours in (("bos", "cls"), ("eos", "sep"), ("pad", ""), ("sep", ""), ("unk", ""), ("mask", "")):
        token = settings.get(f"{name}_token") or settings.get(f"{ours}_token")
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(library.token_to_id(token))
    writer.add_add_bos_token("TemplateProcessing" in str(spec["post_processor"]))
    if kind != "gpt2":
        writer.add_add_eos_token(True)
        writer.add_add_sep_token(kind == "t5")
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])
