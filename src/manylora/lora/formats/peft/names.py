"""How PEFT calls modules, and the order it keeps their rows in."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.modules import LoraModule
from manylora.lora.modules import LoraModuleId as Id

ATTENTION_IDS = {
    "qkv_proj": Id.ATTN_QKV, "query_key_value": Id.ATTN_QKV, "c_attn": Id.ATTN_QKV, "q_proj": Id.ATTN_Q,
    "k_proj": Id.ATTN_K, "v_proj": Id.ATTN_V, "o_proj": Id.ATTN_DENSE, "dense": Id.ATTN_DENSE,
    "c_proj": Id.ATTN_DENSE, "wqkv": Id.ATTN_QKV, "wo": Id.ATTN_DENSE, "q_a_proj": Id.ATTN_Q_A,
    "self.query": Id.ATTN_Q, "self.key": Id.ATTN_K, "self.value": Id.ATTN_V, "output.dense": Id.ATTN_DENSE,
    "out_proj": Id.ATTN_DENSE, "q_b_proj": Id.ATTN_Q_B, "kv_a_proj_with_mqa": Id.ATTN_KV_A,
    "kv_b_proj": Id.ATTN_KV_B, "Wqkv": Id.ATTN_QKV, "Wo": Id.ATTN_DENSE, "attn.q": Id.ATTN_Q,
    "attn.k": Id.ATTN_K, "attn.v": Id.ATTN_V, "attn.o": Id.ATTN_DENSE, "q_lin": Id.ATTN_Q, "k_lin": Id.ATTN_K,
    "v_lin": Id.ATTN_V, "out_lin": Id.ATTN_DENSE,
}  # fmt: skip
MLP_IDS = {
    "gate_proj": Id.MLP_H_TO_4H, "c_fc": Id.MLP_H_TO_4H, "fc1": Id.MLP_H_TO_4H,
    "dense_h_to_4h": Id.MLP_H_TO_4H, "down_proj": Id.MLP_4H_TO_H, "c_proj": Id.MLP_4H_TO_H,
    "fc2": Id.MLP_4H_TO_H, "dense_4h_to_h": Id.MLP_4H_TO_H, "up_proj": Id.MLP_GATE,
    "gate_up_proj": Id.MLP_GATE_UP, "gate": Id.MOE_ROUTER, "shared_expert_gate": Id.MLP_ROUTER,
    "shared_expert.gate_proj": Id.SHARED_EXPERT_H_TO_4H, "shared_expert.up_proj": Id.SHARED_EXPERT_GATE,
    "shared_expert.down_proj": Id.SHARED_EXPERT_4H_TO_H, "w1": Id.MLP_H_TO_4H, "w3": Id.MLP_GATE,
    "shared_experts.gate_proj": Id.SHARED_EXPERT_H_TO_4H, "shared_experts.up_proj": Id.SHARED_EXPERT_GATE,
    "shared_experts.down_proj": Id.SHARED_EXPERT_4H_TO_H,
    "w2": Id.MLP_4H_TO_H, "router": Id.MOE_ROUTER, "router.layer": Id.MOE_ROUTER,
    "proj": Id.MOE_ROUTER,  # below `router`
    "Wi": Id.MLP_GATE_UP, "Wo": Id.MLP_4H_TO_H, "lin1": Id.MLP_H_TO_4H, "lin2": Id.MLP_4H_TO_H,
}  # fmt: skip
# Granite's shared expert. Its routed experts have the same names in transformers 4.
SHARED_IDS = {"input_linear": Id.SHARED_EXPERT_GATE_UP, "output_linear": Id.SHARED_EXPERT_4H_TO_H}
# up_proj, where it is the only matrix into an MLP.
UNGATED = {Id.MLP_GATE: Id.MLP_H_TO_4H, Id.SHARED_EXPERT_GATE: Id.SHARED_EXPERT_H_TO_4H}
PLAIN_IDS = {"input_linear": Id.MLP_GATE_UP, "output_linear": Id.MLP_4H_TO_H}
GATE_UP_IDS = (Id.MLP_GATE_UP, Id.SHARED_EXPERT_GATE_UP)
ENCODER_MLP_IDS = {"intermediate": Id.MLP_H_TO_4H, "output": Id.MLP_4H_TO_H}  # both are called dense
LINEAR_IDS = {
    "in_proj_qkvz": Id.LINEAR_ATTN_QKVZ, "in_proj_ba": Id.LINEAR_ATTN_BA, "in_proj_qkv": Id.LINEAR_ATTN_QKV,
    "in_proj_z": Id.LINEAR_ATTN_Z, "in_proj_b": Id.LINEAR_ATTN_B, "in_proj_a": Id.LINEAR_ATTN_A,
    "out_proj": Id.LINEAR_ATTN_OUT,
}  # fmt: skip
INPUT_IDS = {
    "per_layer_model_projection": Id.PER_LAYER_MODEL_PROJECTION,
    "per_layer_input_gate": Id.PER_LAYER_INPUT_GATE, "per_layer_projection": Id.PER_LAYER_PROJECTION,
    "laurel.linear_left": Id.LAUREL_LEFT, "laurel.linear_right": Id.LAUREL_RIGHT,
    "altup.modality_router": Id.ALTUP_MODALITY_ROUTER, "altup.prediction_coefs": Id.ALTUP_PREDICTION_COEFS,
    "altup.correction_coefs": Id.ALTUP_CORRECTION_COEFS, "altup_projections": Id.ALTUP_PROJECTIONS,
    "altup_unembed_projections": Id.ALTUP_UNEMBED_PROJECTIONS,
}  # fmt: skip
LATENT_IDS = {"fc1_latent_proj": Id.MOE_LATENT_FC1, "fc2_latent_proj": Id.MOE_LATENT_FC2}
CONV_IDS = {"in_proj": Id.MAMBA_IN_PROJ, "out_proj": Id.MAMBA_OUT_PROJ}
MIXER_IDS = {**ATTENTION_IDS, **MLP_IDS, **CONV_IDS, **LATENT_IDS}  # whatever a layer of Nemotron-H is
# Names under which some families stack [q; k; v], or such parts, once for each group of heads, others once.
GROUPED = ("query_key_value", "wqkv", "in_proj_qkvz", "in_proj_ba")
ROOT = (
    r"(?P<root>(?:(?:base_model|model|language_model|backbone|transformer|gpt_neox|bert|roberta|mpnet|electra"
    r"|distilbert|nomic_bert)\.)*)"
)
LAYER = r"(?:layers|h|(?:encoder\.)?layer)\.(?P<layer>\d{1,5})\."
MODULE = (
    rf"(?P<path>{ROOT}(?:{LAYER}(?:"
    r"(?:(?P<mlp>mlp|block_sparse_moe|feed_forward|intermediate|output|router|ffn)|(?P<linear>linear_attn)"
    r"|(?P<conv>conv|mamba)|(?P<shared>shared_mlp)|(?P<mixer>mixer)"
    r"|self_attn|self_attention|attention|attn)"
    r"\.(?P<name>(?:(?:shared_experts?|self|output|attn)\.)?\w+|router\.layer)"
    r"|(?P<own>per_layer_input_gate|per_layer_projection|(?:altup|laurel)\.\w+))"
    r"|(?P<outside>per_layer_model_projection|altup_(?:unembed_)?projections)(?:\.(?P<number>\d{1,5}))?))\."
)
PEFT_KEY = re.compile(
    MODULE + r"(?:lora_(?P<side>[AB])\.weight|lora_magnitude_vector(?:\.weight)?|weight_m_wdecomp\.weight)"
)
"""path: the module's; mlp, linear, conv, shared, mixer: of the MLP, of a recurrent layer, of Granite's
shared expert, of a layer of Nemotron-H, else of attention; own: of the layer itself; outside: of no layer;
side: A or B, None for a DoRA magnitude as PEFT or NVlabs name it."""

VISION = re.compile(
    r"(?:^|\.)(?:vision_\w+|visual|image_\w+|audio_\w+|embed_(?:vision|audio)|multi_modal_projector"
    r"|mm_projector)\."
)
"""In the name of a tensor that belongs to the vision or audio part of a multimodal model."""


def module_id_of(match: re.Match[str], modules: Mapping[int, LoraModule] | None) -> Id | None:
    """Of a match that begins with MODULE; None: no linear layer is called so. modules: the model's."""
    if match["own"] or match["outside"]:
        return INPUT_IDS.get(match["own"] or match["outside"])
    ids = MLP_IDS if match["mlp"] else LINEAR_IDS if match["linear"] else ATTENTION_IDS
    ids = CONV_IDS if match["conv"] else SHARED_IDS if match["shared"] else ids
    ids = MIXER_IDS if match["mixer"] else ids
    found = ids.get(match["name"])
    if match["name"] == "dense" and match["mlp"]:
        found = ENCODER_MLP_IDS.get(match["mlp"])
    if match["shared"] and modules is not None and Id.SHARED_EXPERT_4H_TO_H not in modules:
        return PLAIN_IDS.get(match["name"])  # Granite 4 without experts: a plain MLP of this name
    if modules and not any(module.gated for module in modules.values()):
        return UNGATED.get(found, found) if found is not None else None
    return found


def layer_of(match: re.Match[str]) -> int:
    """Of a match that begins with MODULE: the layer of its rows. Outside layers those are numbered alike."""
    return int(match["layer"] or match["number"] or 0)


def in_our_order(path: str, module_id: int, rows: np.ndarray, module: LoraModule | None) -> np.ndarray:
    """[out] or [out, n] in PEFT's order to the tensor format's. module: the model's, None: not known.

    Raises AdapterInvalidError.
    """
    if module_id in GATE_UP_IDS:
        return _swap_halves(path, rows)
    return _ungroup(path, rows, module) if path.endswith(GROUPED) else rows


def in_peft_order(path: str, module_id: int, rows: np.ndarray, module: LoraModule | None) -> np.ndarray:
    """[out] or [out, n] as a file has it to PEFT's order, which is that of the base's matrix. They
    differ where the halves of a fused gate and up were swapped beforehand. Raises AdapterInvalidError."""
    swapped = module_id in GATE_UP_IDS and module is not None and not module.gate_first
    return _swap_halves(path, rows) if swapped else rows


def _swap_halves(path: str, rows: np.ndarray) -> np.ndarray:
    """PEFT has [gate; up], the tensor format [up; gate]."""
    half, odd = divmod(len(rows), 2)
    if odd:
        raise AdapterInvalidError(f"{path}: the fused gate and up must have an even number of rows")
    return np.concatenate((rows[half:], rows[:half]))


def _ungroup(path: str, rows: np.ndarray, module: LoraModule | None) -> np.ndarray:
    """The base keeps these rows as [q; k; v] once for each group of heads, the tensor format once."""
    if module is None:
        raise AdapterInvalidError(
            f"{path}: the order of its rows depends on the base model, which is not known here: name its "
            "directory (--base in `manylora convert` and tools/hf_lora_convert.py), or send converted tensors"
        )
    stacks = rows.reshape(module.groups, -1, *rows.shape[1:])
    ends = np.cumsum([part // module.groups for part in module.parts])[:-1]
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in np.split(stacks, ends, axis=1)])
