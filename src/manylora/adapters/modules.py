"""The LoRA modules: ids (from TensorRT-LLM's loraModule.h), names, sizes, and which of them a model has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum

from manylora.checkpoints.quant.config import QuantAlgo
from manylora.config.blocks import ConvConfig, DeltaConfig, LayerShape, Mamba2Config
from manylora.config.model import ModelConfig, MoeConfig
from manylora.errors import ConfigError
from manylora.kernels.row_format import RowFormat


class LoraModuleId(IntEnum):
    """TensorRT-LLM's numbers; from 26 on our own. A module's name is its member's in lower case.

    meaning: its matrix's name in Hugging Face models. TensorRT-LLM's converters use 5 for the gate and 7 for
    the other one.
    """

    meaning: str

    def __new__(cls, number: int, meaning: str) -> LoraModuleId:
        made = int.__new__(cls, number)
        made._value_, made.meaning = number, meaning
        return made

    ATTN_QKV = 0, "q_proj, k_proj and v_proj: B is [q; k; v]"
    ATTN_Q = 1, "q_proj"
    ATTN_K = 2, "k_proj"
    ATTN_V = 3, "v_proj"
    ATTN_DENSE = 4, "o_proj"
    MLP_H_TO_4H = 5, "gate_proj, the one behind the activation"
    MLP_4H_TO_H = 6, "down_proj"
    MLP_GATE = 7, "up_proj, the one the activation is multiplied with"
    CROSS_ATTN_QKV = 8, "cross attention: B is [q; k; v]"
    CROSS_ATTN_Q = 9, "cross attention: q_proj"
    CROSS_ATTN_K = 10, "cross attention: k_proj"
    CROSS_ATTN_V = 11, "cross attention: v_proj"
    CROSS_ATTN_DENSE = 12, "cross attention: o_proj"
    MOE_H_TO_4H = 13, "experts: gate_proj (w1)"
    MOE_4H_TO_H = 14, "experts: down_proj (w2)"
    MOE_GATE = 15, "experts: up_proj (w3)"
    MOE_ROUTER = 16, "experts: the router"
    MLP_ROUTER = 17, "shared expert: what it is weighed by"
    MLP_GATE_UP = 18, "up_proj and gate_proj: B is [up; gate]"
    SHARED_EXPERT_H_TO_4H = 19, "shared expert: gate_proj"
    SHARED_EXPERT_4H_TO_H = 20, "shared expert: down_proj"
    SHARED_EXPERT_GATE = 21, "shared expert: up_proj"
    MAMBA_IN_PROJ = 22, "in_proj of Mamba: B is [z; x; B; C; dt], of a convolution layer: [b; c; h]"
    MAMBA_OUT_PROJ = 23, "out_proj of Mamba or a convolution layer"
    MOE_LATENT_FC1 = 24, "fc1_latent_proj, before the routed experts"
    MOE_LATENT_FC2 = 25, "fc2_latent_proj, behind them"
    ATTN_Q_A = 26, "q_a_proj"
    ATTN_Q_B = 27, "q_b_proj"
    ATTN_KV_A = 28, "kv_a_proj_with_mqa"
    ATTN_KV_B = 29, "kv_b_proj"
    # Modules of recurrent layers, which TensorRT-LLM does not have.
    LINEAR_ATTN_QKVZ = 30, "in_proj_qkvz: B is [q; k; v; z]"
    LINEAR_ATTN_BA = 31, "in_proj_ba: B is [b; a]"
    LINEAR_ATTN_QKV = 32, "in_proj_qkv"
    LINEAR_ATTN_Z = 33, "in_proj_z"
    LINEAR_ATTN_B = 34, "in_proj_b"
    LINEAR_ATTN_A = 35, "in_proj_a"
    LINEAR_ATTN_OUT = 36, "out_proj of linear attention"
    # Modules of per-layer embeddings. The first is outside the layers; its rows are stored as layer 0.
    PER_LAYER_MODEL_PROJECTION = 37, "per_layer_model_projection, which is outside layers: as of layer 0"
    PER_LAYER_INPUT_GATE = 38, "per_layer_input_gate"
    PER_LAYER_PROJECTION = 39, "per_layer_projection"
    # Modules of Laurel and AltUp. The last two are outside the layers: projection N is stored as layer N.
    LAUREL_LEFT = 40, "laurel.linear_left"
    LAUREL_RIGHT = 41, "laurel.linear_right"
    ALTUP_MODALITY_ROUTER = 42, "altup.modality_router"
    ALTUP_PREDICTION_COEFS = 43, "altup.prediction_coefs"
    ALTUP_CORRECTION_COEFS = 44, "altup.correction_coefs"
    ALTUP_PROJECTIONS = 45, "altup_projections.N, which are outside layers: N as of layer N"
    ALTUP_UNEMBED_PROJECTIONS = 46, "altup_unembed_projections.N, which are outside layers: N as of layer N"
    SHARED_EXPERT_GATE_UP = 47, "shared expert: up_proj and gate_proj: B is [up; gate]"
    # Modules around all layers, stored as layer 0.
    PROJECT_IN = 48, "project_in, between the embedding and layer 0"
    PROJECT_OUT = 49, "project_out, before the head"


MODULE_NAMES = tuple(one.name.lower() for one in LoraModuleId)
"""Name of each module id."""
EXPERT_IDS = (LoraModuleId.MOE_H_TO_4H, LoraModuleId.MOE_4H_TO_H, LoraModuleId.MOE_GATE)
"""Modules of routed experts. One row holds the matrices of all experts of a layer."""

QKV = {"attn_q", "attn_k", "attn_v"}  # one group: naming one of them enables all three
KV = ("attn_qkv", "attn_k", "attn_v")  # absent in layers that read another layer's keys and values
# Another group. Queries read the decoder's rows, keys and values the encoder's, so the fused module is split.
CROSS = {"cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v"}
# A fused module is available if all the modules that it fuses are.
FUSED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "mlp_gate_up": ("mlp_gate", "mlp_h_to_4h"),
    "cross_attn_qkv": ("cross_attn_q", "cross_attn_k", "cross_attn_v"),
    "shared_expert_gate_up": ("shared_expert_gate", "shared_expert_h_to_4h"),
    "linear_attn_qkvz": ("linear_attn_qkv", "linear_attn_z"),
    "linear_attn_ba": ("linear_attn_b", "linear_attn_a"),
}
RECURRENT = ("linear_attn_", "mamba_")  # name prefixes of modules of recurrent layers


@dataclass(frozen=True)
class LoraModule:
    """A [rank, in_dim] and B [out_dim, rank]; sizes over all ranks.

    counted: whether it takes part in the page geometry. Fused modules do not if their parts do: they would
    double the size of a page and are never used together with their parts.
    parts: for a module of several parts, such as a fused one: sizes that sum to out_dim, each of which ranks
    split. For a routed-expert module, those of each expert.
    groups, transposed: how a checkpoint stores the base model's matrix: in as many stacks of the parts, and
    as [in, out].
    experts: > 1: the dimensions are of all experts together. A is [experts, rank, in_dim / experts] and B
    [experts, out_dim / experts, rank].
    layers: that have the module; None: all. others: the module with its sizes on other layers, where it has
    smaller ones; empty: all layers are equal.
    encoder_layers: number of encoder layers, which precede the decoder's. gated: whether MLPs have a gate.
    gate_first: whether PEFT directories store a fused gate and up as PEFT trains them, [gate; up].
    interleaved: for routed experts, whether rows of gate and up alternate in PEFT's fused matrix.
    named_decoder: whether PEFT's layer names start with `decoder.` although there is no encoder.
    unused: layers without the module for which adapters may still have it, which generation never reads.
    layer_inputs: whether the model has per-layer embeddings.
    allowed: the target modules that were asked for, where these are not all. Empty: all.
    """

    module_id: LoraModuleId
    in_dim: int
    out_dim: int
    split: Split
    counted: bool = True
    parts: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    experts: int = 1
    layers: frozenset[int] | None = None
    encoder_layers: int = 0
    gate_first: bool = True
    gated: bool = True
    interleaved: bool = False
    named_decoder: bool = False
    unused: frozenset[int] = frozenset()
    layer_inputs: bool = False
    allowed: tuple[str, ...] = ()
    others: tuple[LoraModule, ...] = ()

    def at(self, layer: int) -> LoraModule:
        """The module with the sizes of this layer."""
        return next((one for one in self.others if one.layers and layer in one.layers), self)

    def is_on(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def forms(self, count: int) -> list[tuple[LoraModule, int]]:
        """The module with each of its sizes, and on how many of `count` layers it has them."""
        others = [(one, len(one.layers or ())) for one in self.others]
        return [(self, count - sum(number for _, number in others)), *others]

    @property
    def name(self) -> str:
        return MODULE_NAMES[self.module_id]

    def share(self, tp: int) -> LoraModule:
        """The module on one of `tp` ranks. Raises ConfigError if they cannot have equal shares."""
        parts = self.parts or (self.out_dim,)
        sizes = {Split.NONE: (), Split.B_ROWS: parts, Split.A_COLS: (self.in_dim // self.experts,)}
        for size in sizes[self.split]:
            if size % tp:
                raise ConfigError(
                    f"{self.name} has a dimension of {size}, which {tp} ranks cannot share equally"
                )
        if self.split is Split.B_ROWS:
            return replace(self, out_dim=self.out_dim // tp, parts=tuple(part // tp for part in self.parts))
        return replace(self, in_dim=self.in_dim // tp if self.split is Split.A_COLS else self.in_dim)

    def row_sizes(self, row: RowFormat) -> tuple[int, int, int]:
        """Numbers in A, B and the magnitude."""
        return row.sizes(self.in_dim, self.out_dim)

    def row_elements(self, row: RowFormat) -> int:
        return sum(self.row_sizes(row))


def module_name(module_id: int) -> str:
    """For error messages: works for any number, even if no module has it."""
    return MODULE_NAMES[module_id] if 0 <= module_id < len(MODULE_NAMES) else f"INVALID ({module_id})"


def not_enabled(module_id: int, modules: Mapping[int, LoraModule]) -> str:
    """The error for a module that is not among `modules`, the model's."""
    name = module_name(module_id)
    allowed = next((module.allowed for module in modules.values()), ())
    text = f"lora module {name} not enabled for this model"
    if allowed and 0 <= module_id < len(MODULE_NAMES):
        text += f": lora_target_modules allows only {', '.join(allowed)}; add {name} to it, or leave it out"
    return text


def lora_modules(model: ModelConfig, names: tuple[str, ...] = ()) -> dict[int, LoraModule]:
    """The modules an adapter may use on this model, by id. Empty names: all. attn_dense goes from heads *
    head_dim, which may differ from hidden_size. A name of the dense MLP also means the shared expert's.
    Raises ConfigError for a name without a module on this model.
    """
    kinds: dict[LayerShape | None, list[int]] = {}
    for layer, shape in enumerate(model.layer_shapes or (None,) * model.num_layers):
        kinds.setdefault(shape, []).append(layer)
    shaped = [model.of_layer(layers[0]) for layers in kinds.values()]
    known = {name: None for one in shaped for name in module_sizes(one)}
    wanted = set[str]()
    for name in names:
        meant = {name, name.replace("mlp_", "shared_expert_")} & known.keys()
        if not meant:
            raise ConfigError(f"Invalid LoRA module {name}: this model has {', '.join(known)}")
        wanted |= meant
    wanted = wanted or set(known)
    if wanted & QKV:
        wanted |= QKV
    if wanted & CROSS:
        wanted |= CROSS & known.keys()
    allowed = names if wanted < known.keys() else ()
    if len(kinds) == 1:
        return _modules(shaped[0], wanted, allowed)
    found: dict[int, list[LoraModule]] = {}
    for one, numbers in zip(shaped, kinds.values(), strict=True):
        for module_id, module in _modules(one, wanted, allowed).items():
            own = frozenset(numbers) if module.layers is None else module.layers & frozenset(numbers)
            if own:
                found.setdefault(module_id, []).append(replace(module, layers=own))
    return {module_id: _together(forms, model.num_layers) for module_id, forms in sorted(found.items())}


def join_layers(forms: Mapping[int, LoraModule], num_layers: int) -> LoraModule:
    """Join a module's forms on some of `num_layers` layers to one module."""
    return _together([replace(one, layers=frozenset({n}), others=()) for n, one in forms.items()], num_layers)


def _together(forms: list[LoraModule], num_layers: int) -> LoraModule:
    sized: dict[tuple[int, int], LoraModule] = {}
    for one in forms:
        known = sized.get((one.in_dim, one.out_dim))
        layers = (one.layers or frozenset()) | ((known.layers or frozenset()) if known else frozenset())
        sized[one.in_dim, one.out_dim] = replace(one, layers=layers)
    every = frozenset(layer for one in sized.values() for layer in one.layers or ())
    largest, *others = sorted(sized.values(), key=lambda one: -one.in_dim - one.out_dim)
    return replace(largest, layers=None if len(every) == num_layers else every, others=tuple(others))


def _modules(model: ModelConfig, wanted: set[str], allowed: tuple[str, ...]) -> dict[int, LoraModule]:
    dims, grouped = module_sizes(model), grouped_parts(model)
    found: dict[int, LoraModule] = {}
    for name, (in_dim, out_dim, split) in dims.items():
        fused = FUSED.get(name, ())
        if name in wanted or (fused and wanted.issuperset(fused)):
            module_id = LoraModuleId[name.upper()]
            is_fused = bool(fused) and wanted.issuperset(fused)
            moe = model.moe if module_id in EXPERT_IDS else None
            experts = moe.num_experts if moe else 1
            parts = tuple(dims[part][1] for part in fused) or (out_dim,) * (experts if experts > 1 else 0)
            groups, parts = grouped.get(name, (1, parts))
            found[module_id] = LoraModule(
                module_id,
                in_dim * experts,
                out_dim * experts,
                split,
                counted=not is_fused,
                parts=parts,
                groups=groups,
                transposed=moe.transposed if moe and experts > 1 else model.transposed_weights,
                experts=experts,
                layers=_layers(name, model),
                encoder_layers=model.encoder.num_layers if model.encoder else 0,
                gated=model.gated_mlp,
                interleaved=model.moe is not None and model.moe.interleaved,
                named_decoder=model.architecture == "OPTForCausalLM",
                unused=model.kv_readers if name in KV else frozenset(),
                layer_inputs=model.layer_inputs is not None,
                allowed=allowed,
            )
    return found


def _layers(name: str, model: ModelConfig) -> frozenset[int] | None:
    if name.startswith("project_") or name == "per_layer_model_projection":
        return frozenset({0})
    if model.encoder is not None and name.startswith("cross_"):
        return frozenset(range(model.encoder.num_layers, model.num_layers))
    if model.altup is not None and name in ("altup_projections", "altup_unembed_projections"):
        return frozenset(range(model.altup.streams - 1))
    if name.startswith(("per_layer_", "altup_", "laurel_")):
        return None
    if name.startswith(RECURRENT):
        return model.recurrent_layers
    if name.startswith("attn_"):
        found = model.attention_layers - (model.kv_readers if name in KV else frozenset())
    elif name.startswith("mlp_") and name != "mlp_router":
        found = model.mlp_layers
    else:
        found = model.moe.layers if model.moe else frozenset()
    return None if len(found) == model.num_layers else found


logger = logging.getLogger("manylora")

EXPERT_MODULES = tuple(MODULE_NAMES[module_id] for module_id in EXPERT_IDS)
BACKEND = "CUTLASS"


def check_moe_backend(backend: str | None, targets: tuple[str, ...], model: ModelConfig) -> None:
    """Only TensorRT-LLM's backend that supports adapters of experts is accepted. targets: as for
    `lora_modules`. Raises ConfigError.
    """
    if backend is None or backend.upper() == BACKEND:
        return
    served = {module.name for module in lora_modules(model, targets).values()}
    adapted = [name for name in EXPERT_MODULES if name in served]
    if adapted:
        raise ConfigError(
            f"Routed-expert MoE LoRA requires moe_backend='{BACKEND}'; got moe_backend='{backend}'. Disable "
            f"LoRA on MoE modules (remove {adapted} from lora_config.lora_target_modules) or switch to the "
            "Cutlass MoE backend."
        )
    raise ConfigError(f"LLM: moe_backend must be '{BACKEND}' or left out, got '{backend}'")


def targets_beside_quantised_experts(
    targets: tuple[str, ...], model: ModelConfig, algo: str | None
) -> tuple[str, ...]:
    """Target modules beside experts quantised with `algo`: with FP8 and MXFP4 any; otherwise, if none are
    named, all but those of experts. Raises ConfigError if modules of experts are named.
    """
    if algo in (QuantAlgo.FP8, QuantAlgo.W4A16_MXFP4):
        return targets
    adapted = [name for name in EXPERT_MODULES if name in targets]
    if adapted:
        raise ConfigError(
            "Routed-expert MoE LoRA only supports unquantized fp16/bf16 or per-tensor FP8 (qdq) base "
            f"weights; got quant_mode={algo}. Disable LoRA on MoE modules (remove {adapted} from "
            "lora_config.lora_target_modules) or serve the model unquantised or in FP8."
        )
    if targets:
        return targets
    logger.info("adapters on routed experts are off: the experts are quantised")
    return tuple(module.name for module in beside_experts(lora_modules(model)).values())


def beside_experts(modules: Mapping[int, LoraModule]) -> dict[int, LoraModule]:
    return {module_id: module for module_id, module in modules.items() if module_id not in EXPERT_IDS}


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
