"""The keys of config.json that only some architectures have, from a GGUF file's metadata."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from manylora.checkpoints.gguf.container import Metadata

# Layers of those whose queries are scaled by hidden size over heads.
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
SIGMOID = 2  # expert_gating_func
ROBERTA_PADDING = 1  # token id
POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}  # pooling_type
LLAMA4_WITHOUT_NORMS = 128  # experts of the Llama 4 that does not normalise queries and keys


def common(one: Metadata) -> dict[str, Any]:
    """Biases and numbers of experts, under each name that a config.json may have for them."""
    biased = one.in_any("attn_q.bias") or one.in_any("attn_qkv.bias")
    fields = dict.fromkeys(("attention_bias", "use_bias", "qkv_bias", "use_qkv_bias", "bias"), biased)
    fields["mlp_bias"] = one.in_any("ffn_up.bias")
    if not one.number("expert_count", 0):
        return fields
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return {
        **fields,
        **dict.fromkeys(counts, one.number("expert_count")),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts"), one.number("expert_used_count")),
        "moe_intermediate_size": one.number("expert_feed_forward_length", one.inner_size),
    }


def partial(one: Metadata) -> dict[str, Any]:
    return {"partial_rotary_factor": one.rotated_share}


def shared_size(one: Metadata) -> int:
    """Of the experts that every token has."""
    return one.number("expert_shared_feed_forward_length")


def routed(one: Metadata, normalised: bool = True) -> dict[str, Any]:
    """Experts of DeepSeek's kind. normalised: whether weights are, if the file does not say."""
    return {
        "n_shared_experts": one.number("expert_shared_count", 0),
        "first_k_dense_replace": one.number("leading_dense_block_count", 0),
        "routed_scaling_factor": one.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(one.get("expert_weights_norm", normalised)),
        "n_group": one.number("expert_group_count", 1) or 1,
        "topk_group": one.number("expert_group_used_count", 1) or 1,
    }


def layer_kinds(one: Metadata, tensor: str, kind: str, other: str = "full_attention") -> list[str]:
    return [kind if one.has(f"blk.{layer}.{tensor}") else other for layer in range(one.layers)]


def pattern(one: Metadata) -> dict[str, Any]:
    """The layers with a window, if the file names them."""
    fields: dict[str, Any] = {}
    if one.get("attention.sliding_window") is not None:
        fields["sliding_window"] = one.number("attention.sliding_window")
    found = one.get("attention.sliding_window_pattern")
    if isinstance(found, list):
        kinds = one.per_layer("attention.sliding_window_pattern")
        fields["layer_types"] = ["sliding_attention" if kind else "full_attention" for kind in kinds]
    elif found is not None:
        fields["sliding_window_pattern"] = one.number("attention.sliding_window_pattern")
    return fields


def mistral3(one: Metadata) -> dict[str, Any]:
    """Ministral 3 scales queries by their position; Mistral Small 3.1 and 3.2 do not."""
    beta = one.get("attention.temperature_scale")
    if beta is None:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    scale = one.number("rope.scaling.yarn_log_multiplier")
    own = {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": beta}
    return {"rope_scaling": own, "sliding_window": None}


def gemma(one: Metadata) -> dict[str, Any]:
    size = one.count("embedding_length")
    largest = LARGEST_GEMMAS.get(one.kind) == one.layers
    fields = {"query_pre_attn_scalar": size // one.heads if largest else one.head_dim, **pattern(one)}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields[name] = one.number(name, 0) or None
    if one.kind != "gemma2":
        fields["rope_local_base_freq"] = one.number("rope.freq_base_swa", 10000.0)
    if one.kind == "gemma-embedding":
        fields["use_bidirectional_attention"] = True
    return fields


def granite(one: Metadata) -> dict[str, Any]:
    return {
        "attention_multiplier": one.number("attention.scale", one.head_dim**-0.5),
        "embedding_multiplier": one.number("embedding_scale", 1.0),
        "residual_multiplier": one.number("residual_scale", 1.0),
        "logits_scaling": one.number("logit_scale", 1.0),
    }


def granite_moe(one: Metadata) -> dict[str, Any]:
    size = one.number("expert_shared_feed_forward_length", 0)
    kind = "GraniteMoeSharedForCausalLM" if size else "GraniteMoeForCausalLM"
    inner = {"intermediate_size": one.number("feed_forward_length"), "shared_intermediate_size": size}
    return {"architectures": [kind], **granite(one), **inner}


def granite_hybrid(one: Metadata) -> dict[str, Any]:
    kinds = layer_kinds(one, "ssm_in.weight", "mamba", "attention")
    return {
        **granite(one),
        "num_key_value_heads": attended_heads(one),
        "layer_types": kinds,
        "intermediate_size": one.number("feed_forward_length"),
        "shared_intermediate_size": one.number("expert_shared_feed_forward_length", one.inner_size),
        "num_local_experts": one.number("expert_count", 0),
        "num_experts_per_tok": one.number("expert_used_count", 0),
        "position_embedding_type": "rope" if one.get("rope.scaling.finetuned", True) else "nope",
        **(mamba2(one) if "mamba" in kinds else {}),
    }


def mamba2(one: Metadata) -> dict[str, Any]:
    heads, size = one.count("ssm.time_step_rank"), one.count("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size // heads,
        "mamba_expand": size / one.count("embedding_length"),
        "mamba_n_groups": one.count("ssm.group_count"),
        "mamba_d_state": one.count("ssm.state_size"),
        "mamba_d_conv": one.count("ssm.conv_kernel"),
        "mamba_conv_bias": one.in_any("ssm_conv1d.bias"),
        "mamba_proj_bias": one.in_any("ssm_in.bias"),
    }


def falcon_h1(one: Metadata) -> dict[str, Any]:
    """llama.cpp's converter multiplies the weights by Falcon-H1's multipliers, and the file lacks those."""
    return {
        **mamba2(one),
        "mamba_d_ssm": one.count("ssm.inner_size"),
        "mamba_rms_norm": one.in_any("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": one.in_any("ssm_out.bias"),
        "multiplied_weights": True,
    }


def nemotron_h(one: Metadata) -> dict[str, Any]:
    """The kind of a layer is that of its tensors."""
    kinds = {
        "ssm_in.weight": "linear_attention", "attn_q.weight": "full_attention", "ffn_up.weight": "mlp",
        "ffn_gate_inp.weight": "moe",
    }  # fmt: skip
    heads = one.count("ssm.time_step_rank")
    fields: dict[str, Any] = {
        "layers_block_type": [
            next((kind for name, kind in kinds.items() if one.has(f"blk.{layer}.{name}")), "none")
            for layer in range(one.layers)
        ],
        "mamba_num_heads": heads,
        "mamba_head_dim": one.count("ssm.inner_size") // heads,
        "n_groups": one.count("ssm.group_count"),
        "ssm_state_size": one.count("ssm.state_size"),
        "conv_kernel": one.count("ssm.conv_kernel"),
        "use_conv_bias": one.in_any("ssm_conv1d.bias"),
        "use_bias": one.in_any("ssm_in.bias"),
    }
    if not one.number("expert_count", 0):
        return fields
    latent = one.number("moe_latent_size", 0) or None
    more = {"moe_shared_expert_intermediate_size": shared_size(one), "moe_latent_size": latent}
    return {**fields, **routed(one), **more}


def attended_heads(one: Metadata) -> int:
    """The key heads of layers with attention, from their tensors."""
    rows = (one.rows(f"blk.{layer}.attn_k.weight") for layer in range(one.layers))
    return max(rows, default=0) // one.head_dim or one.heads


def olmo2(one: Metadata) -> dict[str, Any]:
    if one.get("attention.sliding_window") is None:
        return {}
    local = one.number("rope.freq_base_swa", one.number("rope.freq_base", 10000.0))
    fields = {"rope_local_base_freq": local, **pattern(one)}
    return {"architectures": ["Olmo3ForCausalLM"], **fields}


def ernie_moe(one: Metadata) -> dict[str, Any]:
    inner = one.count("expert_feed_forward_length")
    shared = one.rows(f"blk.{one.layers - 1}.ffn_up_shexp.weight")
    return {
        "moe_num_shared_experts": shared // inner,
        "moe_layer_start_index": one.number("leading_dense_block_count", 0),
        "moe_layer_interval": one.number("interleave_moe_layer_step", 1),
    }


def gpt_oss(one: Metadata) -> dict[str, Any]:
    inner = one.count("expert_feed_forward_length")
    return {**pattern(one), "intermediate_size": inner, "rope_scaling": {"truncate": False}}


def deepseek2(one: Metadata) -> dict[str, Any]:
    """Version 2, 3, or GLM 4.7 Flash; old files have no separate lengths for latent attention."""
    rope = one.number("rope.dimension_count")
    own = "_mla" if one.get("attention.key_length_mla") is not None else ""
    fields: dict[str, Any] = {
        **routed(one, normalised=False),
        "q_lora_rank": one.number("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": one.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": one.number(f"attention.key_length{own}") - rope,
        "v_head_dim": one.number(f"attention.value_length{own}"),
        "num_key_value_heads": one.heads,
        "head_dim": rope,
    }
    scale = one.number("rope.scaling.yarn_log_multiplier", 0)
    if scale:  # llama.cpp's converter multiplies it by 0.1, and its runtime takes both for equal
        fields["rope_scaling"] = {"mscale": scale * 10, "mscale_all_dim": scale * 10}
    if one.in_any("exp_probs_b.bias") or one.number("expert_gating_func", 0) == SIGMOID:
        return fields
    method = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    return {**fields, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


def llama4(one: Metadata) -> dict[str, Any]:
    """What the file does not say is as in llama.cpp: chunks of 8,192 tokens, every fourth layer without."""
    fields = {
        "intermediate_size": one.count("expert_feed_forward_length"),
        "intermediate_size_mlp": one.number("feed_forward_length"),
        "interleave_moe_layer_step": one.number("interleave_moe_layer_step"),
        "use_qk_norm": one.number("expert_count") != LLAMA4_WITHOUT_NORMS,
    }
    if one.get("attention.sliding_window") == 0:
        fields["no_rope_layers"] = [1] * one.layers
        fields["layer_types"] = ["full_attention"] * one.layers
    return fields


def lfm2(one: Metadata) -> dict[str, Any]:
    return {
        "layer_types": layer_kinds(one, "shortconv.conv.weight", "conv"),
        "conv_L_cache": one.number("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(one: Metadata) -> dict[str, Any]:
    dense = one.number("leading_dense_block_count", 0)
    corrected = one.in_any("exp_probs_b.bias")
    scale = one.number("expert_weights_scale", 1.0)
    fields = {"num_dense_layers": dense, "use_expert_bias": corrected, "routed_scaling_factor": scale}
    return {**lfm2(one), **fields, "norm_topk_prob": True}


def delta(one: Metadata) -> dict[str, Any]:
    """Gated delta rules in the layers that have no attention."""
    heads = one.count("ssm.time_step_rank")
    fields = {
        "layer_types": layer_kinds(one, "ssm_out.weight", "linear_attention"),
        "linear_conv_kernel_dim": one.count("ssm.conv_kernel"),
        "linear_key_head_dim": one.count("ssm.state_size"),
        "linear_num_key_heads": one.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": one.count("ssm.inner_size") // heads,
        **partial(one),
    }
    if not one.number("expert_count", 0):
        return fields
    return {**fields, "shared_expert_intermediate_size": shared_size(one), "norm_topk_prob": True}


def neox(one: Metadata) -> dict[str, Any]:
    return {
        "rotary_pct": one.rotated_share,
        "rotary_emb_base": one.number("rope.freq_base", 10000.0),
        "use_parallel_residual": bool(one.get("use_parallel_residual", True)),
    }


def falcon(one: Metadata) -> dict[str, Any]:
    kv_heads = one.number("attention.head_count_kv", 1)
    return {
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if one.in_any("attn_norm_2.weight") else 1,
        "ffn_hidden_size": one.inner_size,
    }


def stablelm(one: Metadata) -> dict[str, Any]:
    return {
        **partial(one),
        "qk_layernorm": one.in_any("attn_q_norm.weight"),
        "use_parallel_residual": not one.in_any("ffn_norm.weight"),
    }


def shared_kv(one: Metadata) -> dict[str, Any]:
    table = one.header.tensors.get("per_layer_token_embd.weight")
    return {
        **pattern(one),
        "num_kv_shared_layers": one.number("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": one.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": 0 if table is None else table.shape[0],
        "final_logit_softcapping": one.number("final_logit_softcapping", 0) or None,
        "rope_local_base_freq": one.number("rope.freq_base_swa", 10000.0),
    }


def gemma3n(one: Metadata) -> dict[str, Any]:
    scales = one.get("activation_sparsity_scale", [])  # the quantiles of a normal distribution
    return {
        **shared_kv(one),
        "num_kv_shared_layers": one.number("attention.shared_kv_layers"),
        "final_logit_softcapping": one.number("final_logit_softcapping", 30.0) or None,
        "altup_num_inputs": one.number("altup.num_inputs"),
        "altup_active_idx": one.number("altup.active_idx"),
        "laurel_rank": one.rows("blk.0.laurel_l.weight"),
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales] or None,
    }


def gemma4(one: Metadata) -> dict[str, Any]:
    """Layers with and without a window have heads of two sizes. Values that are keys have no tensor."""
    full, own = one.head_dim, one.number("attention.key_length_swa", one.head_dim)
    fields = shared_kv(one)
    kinds = fields.get("layer_types", [])
    heads = dict(zip(kinds, one.per_layer("attention.head_count_kv"), strict=False))
    small = heads.get("sliding_attention", heads.get("full_attention", one.heads))
    sizes = one.per_layer("feed_forward_length")
    shares = one.header.tensors.get("rope_freqs.weight")
    reads = any(
        one.has(f"blk.{n}.attn_k.weight") and not one.has(f"blk.{n}.attn_v.weight") for n in range(one.layers)
    )
    fields |= {
        "head_dim": own,
        "global_head_dim": full,
        "num_key_value_heads": small,
        "num_global_key_value_heads": heads.get("full_attention", small),
        "attention_k_eq_v": reads,
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": max(sizes) == 2 * min(sizes),
        "enable_moe_block": bool(one.number("expert_count", 0)),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": fields["rope_local_base_freq"]},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": one.number("rope.freq_base", 1000000.0),
                "partial_rotary_factor": 0.25 if shares is not None else 1.0,
            },
        },
    }
    return fields


def bert(one: Metadata, architecture: str = "Bert", kind: str = "bert") -> dict[str, Any]:
    fields = {"model_type": kind, "type_vocab_size": one.rows("token_types.weight")}
    return {**fields, **labels(one, architecture)}


def roberta(one: Metadata) -> dict[str, Any]:
    longest = one.number("context_length") + ROBERTA_PADDING + 1
    fields = {"max_position_embeddings": longest, "pad_token_id": ROBERTA_PADDING}
    return {**bert(one, "XLMRoberta", "xlm-roberta"), **fields}


def modern_bert(one: Metadata) -> dict[str, Any]:
    windows = pattern(one)
    return {
        **windows,
        "model_type": "modernbert",
        "local_attention": one.number("attention.sliding_window"),
        "global_attn_every_n_layers": windows.get("sliding_window_pattern", 3),
        "hidden_activation": one.get("hidden_activation", "gelu"),
        "rope_local_base_freq": one.number("rope.freq_base_swa", 10000.0),
        "classifier_pooling": POOLINGS.get(one.get("classifier.pooling_type"), "mean"),
        **labels(one, "ModernBert"),
    }


def labels(one: Metadata, architecture: str) -> dict[str, Any]:
    count = one.rows("cls.output.weight")
    if not count:
        return {}
    names = one.get("classifier.output_labels", [])
    names = names if len(names) == count else [f"LABEL_{number}" for number in range(count)]
    found = {str(number): name for number, name in enumerate(names)}
    return {"architectures": [f"{architecture}ForSequenceClassification"], "id2label": found}
