"""Input and output sizes of the linear layers that adapters may change, for each kind of layer."""

from __future__ import annotations

from enum import Enum

from manylora.config.blocks import ConvConfig, DeltaConfig, LatentConfig, Mamba2Config
from manylora.config.model import ModelConfig


class Split(Enum):
    """What tensor parallelism splits: rows of B, columns of A, or nothing."""

    B_ROWS = "B rows"
    A_COLS = "A cols"
    NONE = "none"


def module_sizes(model: ModelConfig) -> dict[str, tuple[int, int, Split]]:
    """Input and output size of each module, for a model whose layers are equal."""
    dims = {**_dense_dims(model), **_recurrent_dims(model), **_moe_dims(model)}
    dims |= {**_layer_input_dims(model), **_altup_dims(model)}
    if model.encoder is not None:
        dims |= {f"cross_{name}": sizes for name, sizes in _attention_dims(model).items()}
    return dims


def _dense_dims(model: ModelConfig) -> dict[str, tuple[int, int, Split]]:
    hidden, inner = model.hidden_size, model.intermediate_size
    attention = _attention_dims(model)
    mlp = {
        "mlp_h_to_4h": (hidden, inner, Split.B_ROWS),
        "mlp_4h_to_h": (inner, hidden, Split.A_COLS),
    }
    gated = {
        "mlp_gate": (hidden, inner, Split.B_ROWS),
        "mlp_gate_up": (hidden, 2 * inner, Split.B_ROWS),
    }
    if not model.mlp_layers:
        return attention
    around = {}
    if size := model.projected_size:
        around = {"project_in": (size, hidden, Split.NONE), "project_out": (hidden, size, Split.NONE)}
    return {**attention, **mlp, **(gated if model.gated_mlp else {}), **around}


def _attention_dims(model: ModelConfig) -> dict[str, tuple[int, int, Split]]:
    if model.latent is not None:
        return _latent_dims(model, model.latent)
    hidden, q, kv = model.hidden_size, model.q_rows, model.kv_size
    if model.keys_are_values:  # an adapter of one changes the other, too
        return {
            "attn_q": (hidden, q, Split.B_ROWS),
            "attn_k": (hidden, kv, Split.B_ROWS),
            "attn_dense": (model.q_size, hidden, Split.A_COLS),
        }
    return {
        "attn_qkv": (hidden, q + 2 * kv, Split.B_ROWS),
        "attn_q": (hidden, q, Split.B_ROWS),
        "attn_k": (hidden, kv, Split.B_ROWS),
        "attn_v": (hidden, kv, Split.B_ROWS),
        "attn_dense": (model.q_size, hidden, Split.A_COLS),
    }


def _latent_dims(model: ModelConfig, latent: LatentConfig) -> dict[str, tuple[int, int, Split]]:
    """Tensor parallelism does not split projections that all heads share."""
    hidden, heads = model.hidden_size, model.num_heads
    q = {"attn_q": (hidden, heads * latent.query_dim, Split.B_ROWS)}
    if latent.q_rank:
        q = {
            "attn_q_a": (hidden, latent.q_rank, Split.NONE),
            "attn_q_b": (latent.q_rank, heads * latent.query_dim, Split.B_ROWS),
        }
    return {
        **q,
        "attn_kv_a": (hidden, latent.cached_dim, Split.NONE),
        "attn_kv_b": (latent.kv_rank, heads * (latent.plain_dim + latent.value_dim), Split.B_ROWS),
        "attn_dense": (heads * latent.value_dim, hidden, Split.A_COLS),
    }


def _recurrent_dims(model: ModelConfig) -> dict[str, tuple[int, int, Split]]:
    hidden, own = model.hidden_size, model.recurrent
    if isinstance(own, ConvConfig):
        return {
            "mamba_in_proj": (hidden, 3 * own.channels, Split.B_ROWS),
            "mamba_out_proj": (own.channels, hidden, Split.A_COLS),
        }
    if isinstance(own, Mamba2Config):
        return {
            "mamba_in_proj": (hidden, own.in_size, Split.B_ROWS),
            "mamba_out_proj": (own.value_size, hidden, Split.A_COLS),
        }
    if not isinstance(own, DeltaConfig):
        return {}
    outs = {"qkv": own.channels, "z": own.value_size, "b": own.value_heads, "a": own.value_heads}
    outs |= {"qkvz": own.channels + own.value_size, "ba": 2 * own.value_heads}
    dims = {f"linear_attn_{name}": (hidden, size, Split.B_ROWS) for name, size in outs.items()}
    return {**dims, "linear_attn_out": (own.value_size, hidden, Split.A_COLS)}


def _altup_dims(model: ModelConfig) -> dict[str, tuple[int, int, Split]]:
    hidden, own = model.hidden_size, model.altup
    if own is None:
        return {}
    sizes = {
        "laurel_left": (hidden, own.laurel_rank),
        "laurel_right": (own.laurel_rank, hidden),
        "altup_modality_router": (hidden, own.streams),
        "altup_prediction_coefs": (own.streams, own.streams**2),
        "altup_correction_coefs": (own.streams, own.streams),
        "altup_projections": (hidden, hidden),
        "altup_unembed_projections": (hidden, hidden),
    }
    return {name: (*ends, Split.NONE) for name, ends in sizes.items()}


def _layer_input_dims(model: ModelConfig) -> dict[str, tuple[int, int, Split]]:
    hidden, own = model.hidden_size, model.layer_inputs
    if own is None:
        return {}
    return {
        "per_layer_model_projection": (hidden, own.layers * own.dim, Split.NONE),
        "per_layer_input_gate": (hidden, own.dim, Split.NONE),
        "per_layer_projection": (own.dim, hidden, Split.NONE),
    }


def _moe_dims(model: ModelConfig) -> dict[str, tuple[int, int, Split]]:
    """For routed experts, the sizes of one expert."""
    if model.moe is None:
        return {}
    hidden, inner, shared = model.hidden_size, model.moe.intermediate_size, model.moe.shared_intermediate_size
    latent = model.moe.latent_size
    seen = latent or hidden
    routed = {
        "moe_h_to_4h": (seen, inner, Split.B_ROWS),
        "moe_4h_to_h": (inner, seen, Split.A_COLS),
        "moe_gate": (seen, inner, Split.B_ROWS),
        "moe_router": (hidden, model.moe.num_experts, Split.NONE),
    }
    if latent:
        routed["moe_latent_fc1"] = (hidden, latent, Split.NONE)
        routed["moe_latent_fc2"] = (latent, hidden, Split.NONE)
    if not model.moe.gated:
        del routed["moe_gate"]
    if not shared:
        return routed
    gated = {
        "shared_expert_gate": (hidden, shared, Split.B_ROWS),
        "shared_expert_gate_up": (hidden, 2 * shared, Split.B_ROWS),
    }
    return {
        **routed,
        **({"mlp_router": (hidden, 1, Split.NONE)} if model.moe.shared_gated else {}),
        "shared_expert_h_to_4h": (hidden, shared, Split.B_ROWS),
        "shared_expert_4h_to_h": (shared, hidden, Split.A_COLS),
        **(gated if model.moe.gated else {}),
    }


def grouped_parts(model: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """For modules whose rows have several parts, which a checkpoint may store in groups: the number of
    groups, and the parts.
    """
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    found["attn_qkv"] = (model.qkv_groups, (model.q_rows, model.kv_size, model.kv_size))
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
