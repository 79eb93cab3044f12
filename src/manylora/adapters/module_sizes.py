"""Input and output sizes of the linear layers that adapters may change, for each kind of layer."""

from __future__ import annotations

from enum import Enum

from manylora.config.blocks import ConvConfig, DeltaConfig, Mamba2Config
from manylora.config.model import ModelConfig, MoeConfig


class Split(Enum):
    """What tensor parallelism splits: rows of B, columns of A, or nothing."""

    B_ROWS = "B rows"
    A_COLS = "A cols"
    NONE = "none"


Sizes = dict[str, tuple[int, int, Split]]
ROWS, COLUMNS, WHOLE = Split.B_ROWS, Split.A_COLS, Split.NONE


def module_sizes(model: ModelConfig) -> Sizes:
    """Input and output size of each module of a model with equal layers; for experts, of one expert."""
    hidden, inner = model.hidden_size, model.intermediate_size
    dims = _attention_sizes(model)
    if model.mlp_layers:
        dims |= {"mlp_h_to_4h": (hidden, inner, ROWS), "mlp_4h_to_h": (inner, hidden, COLUMNS)}
        if model.gated_mlp:
            dims |= {"mlp_gate": (hidden, inner, ROWS), "mlp_gate_up": (hidden, 2 * inner, ROWS)}
        if size := model.projected_size:
            dims |= {"project_in": (size, hidden, WHOLE), "project_out": (hidden, size, WHOLE)}
    recurrent = model.recurrent
    if isinstance(recurrent, ConvConfig):
        dims["mamba_in_proj"] = hidden, 3 * recurrent.channels, ROWS
        dims["mamba_out_proj"] = recurrent.channels, hidden, COLUMNS
    elif isinstance(recurrent, Mamba2Config):
        dims["mamba_in_proj"] = hidden, recurrent.in_size, ROWS
        dims["mamba_out_proj"] = recurrent.value_size, hidden, COLUMNS
    elif isinstance(recurrent, DeltaConfig):
        channels, size, heads = recurrent.channels, recurrent.value_size, recurrent.value_heads
        outs = {"qkv": channels, "z": size, "b": heads, "a": heads, "qkvz": channels + size, "ba": 2 * heads}
        dims |= {f"linear_attn_{name}": (hidden, out, ROWS) for name, out in outs.items()}
        dims["linear_attn_out"] = size, hidden, COLUMNS
    if model.moe is not None:
        dims |= _expert_sizes(hidden, model.moe)
    if (inputs := model.layer_inputs) is not None:
        dims["per_layer_model_projection"] = hidden, inputs.layers * inputs.dim, WHOLE
        dims["per_layer_input_gate"] = hidden, inputs.dim, WHOLE
        dims["per_layer_projection"] = inputs.dim, hidden, WHOLE
    if (altup := model.altup) is not None:
        streams = altup.streams
        dims["laurel_left"] = hidden, altup.laurel_rank, WHOLE
        dims["laurel_right"] = altup.laurel_rank, hidden, WHOLE
        dims["altup_modality_router"] = hidden, streams, WHOLE
        dims["altup_prediction_coefs"] = streams, streams**2, WHOLE
        dims["altup_correction_coefs"] = streams, streams, WHOLE
        dims["altup_projections"] = dims["altup_unembed_projections"] = hidden, hidden, WHOLE
    if model.encoder is not None:
        dims |= {f"cross_{name}": sizes for name, sizes in _attention_sizes(model).items()}
    return dims


def _attention_sizes(model: ModelConfig) -> Sizes:
    hidden, heads, latent = model.hidden_size, model.num_heads, model.latent
    if latent is None:
        q, kv = model.q_rows, model.kv_size
        sizes = {
            "attn_qkv": (hidden, q + 2 * kv, ROWS),
            "attn_q": (hidden, q, ROWS),
            "attn_k": (hidden, kv, ROWS),
            "attn_v": (hidden, kv, ROWS),
            "attn_dense": (model.q_size, hidden, COLUMNS),
        }
        if model.keys_are_values:  # an adapter of one changes the other, too
            del sizes["attn_qkv"], sizes["attn_v"]
        return sizes
    # Tensor parallelism does not split projections that all heads share.
    if latent.q_rank:
        sizes = {
            "attn_q_a": (hidden, latent.q_rank, WHOLE),
            "attn_q_b": (latent.q_rank, heads * latent.query_dim, ROWS),
        }
    else:
        sizes = {"attn_q": (hidden, heads * latent.query_dim, ROWS)}
    return {
        **sizes,
        "attn_kv_a": (hidden, latent.cached_dim, WHOLE),
        "attn_kv_b": (latent.kv_rank, heads * (latent.plain_dim + latent.value_dim), ROWS),
        "attn_dense": (heads * latent.value_dim, hidden, COLUMNS),
    }


def _expert_sizes(hidden: int, moe: MoeConfig) -> Sizes:
    inner, shared, seen = moe.intermediate_size, moe.shared_intermediate_size, moe.latent_size or hidden
    sizes = {"moe_h_to_4h": (seen, inner, ROWS), "moe_4h_to_h": (inner, seen, COLUMNS)}
    if moe.gated:
        sizes["moe_gate"] = seen, inner, ROWS
    sizes["moe_router"] = hidden, moe.num_experts, WHOLE
    if moe.latent_size:
        sizes["moe_latent_fc1"] = hidden, seen, WHOLE
        sizes["moe_latent_fc2"] = seen, hidden, WHOLE
    if shared:
        if moe.shared_gated:
            sizes["mlp_router"] = hidden, 1, WHOLE
        sizes["shared_expert_h_to_4h"] = hidden, shared, ROWS
        sizes["shared_expert_4h_to_h"] = shared, hidden, COLUMNS
        if moe.gated:
            sizes["shared_expert_gate"] = hidden, shared, ROWS
            sizes["shared_expert_gate_up"] = hidden, 2 * shared, ROWS
    return sizes


def grouped_parts(model: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """For modules of several parts: in how many groups a checkpoint stores them, and the parts."""
    found: dict[str, tuple[int, tuple[int, ...]]]
    found = {"attn_qkv": (model.qkv_groups, (model.q_rows, model.kv_size, model.kv_size))}
    own = model.recurrent
    if isinstance(own, DeltaConfig):
        qkvz = (own.key_size, own.key_size, own.value_size, own.value_size)
        found["linear_attn_qkvz"] = own.key_heads, qkvz
        found["linear_attn_ba"] = own.key_heads, (own.value_heads,) * 2
        found["linear_attn_qkv"] = 1, qkvz[:3]
    if isinstance(own, ConvConfig):
        found["mamba_in_proj"] = 1, (own.channels,) * 3
    if isinstance(own, Mamba2Config):
        keys = own.groups * own.state_dim
        found["mamba_in_proj"] = 1, (own.value_size, own.value_size, keys, keys, own.heads)
    return found
