"""The LoRA modules: ids (from TensorRT-LLM's loraModule.h), names, and which of them a model has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from manylora.adapters.module_sizes import Split, grouped_parts, module_sizes
from manylora.checkpoints.quant.config import QuantAlgo
from manylora.config.blocks import LayerShape
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.kernels.row_format import RowFormat


class LoraModuleId(IntEnum):
    """TensorRT-LLM's numbers; from 26 on our own. A module's name is its member's in lower case."""

    ATTN_QKV = 0
    ATTN_Q = 1
    ATTN_K = 2
    ATTN_V = 3
    ATTN_DENSE = 4
    MLP_H_TO_4H = 5
    MLP_4H_TO_H = 6
    MLP_GATE = 7
    CROSS_ATTN_QKV = 8
    CROSS_ATTN_Q = 9
    CROSS_ATTN_K = 10
    CROSS_ATTN_V = 11
    CROSS_ATTN_DENSE = 12
    MOE_H_TO_4H = 13
    MOE_4H_TO_H = 14
    MOE_GATE = 15
    MOE_ROUTER = 16
    MLP_ROUTER = 17
    MLP_GATE_UP = 18
    SHARED_EXPERT_H_TO_4H = 19
    SHARED_EXPERT_4H_TO_H = 20
    SHARED_EXPERT_GATE = 21
    MAMBA_IN_PROJ = 22
    MAMBA_OUT_PROJ = 23
    MOE_LATENT_FC1 = 24
    MOE_LATENT_FC2 = 25
    ATTN_Q_A = 26
    ATTN_Q_B = 27
    ATTN_KV_A = 28
    ATTN_KV_B = 29
    # Modules of recurrent layers, which TensorRT-LLM does not have.
    LINEAR_ATTN_QKVZ = 30
    LINEAR_ATTN_BA = 31
    LINEAR_ATTN_QKV = 32
    LINEAR_ATTN_Z = 33
    LINEAR_ATTN_B = 34
    LINEAR_ATTN_A = 35
    LINEAR_ATTN_OUT = 36
    # Modules of per-layer embeddings. The first is outside the layers; its rows are stored as layer 0.
    PER_LAYER_MODEL_PROJECTION = 37
    PER_LAYER_INPUT_GATE = 38
    PER_LAYER_PROJECTION = 39
    # Modules of Laurel and AltUp. The last two are outside the layers: projection N is stored as layer N.
    LAUREL_LEFT = 40
    LAUREL_RIGHT = 41
    ALTUP_MODALITY_ROUTER = 42
    ALTUP_PREDICTION_COEFS = 43
    ALTUP_CORRECTION_COEFS = 44
    ALTUP_PROJECTIONS = 45
    ALTUP_UNEMBED_PROJECTIONS = 46
    SHARED_EXPERT_GATE_UP = 47
    # Modules around all layers, stored as layer 0.
    PROJECT_IN = 48
    PROJECT_OUT = 49


MEANINGS = (
    "q_proj, k_proj and v_proj: B is [q; k; v]", "q_proj", "k_proj", "v_proj", "o_proj",
    "gate_proj, the one behind the activation", "down_proj",
    "up_proj, the one the activation is multiplied with",
    "cross attention: B is [q; k; v]", "cross attention: q_proj", "cross attention: k_proj",
    "cross attention: v_proj", "cross attention: o_proj",
    "experts: gate_proj (w1)", "experts: down_proj (w2)", "experts: up_proj (w3)",
    "experts: the router", "shared expert: what it is weighed by",
    "up_proj and gate_proj: B is [up; gate]",
    "shared expert: gate_proj", "shared expert: down_proj", "shared expert: up_proj",
    "in_proj of Mamba: B is [z; x; B; C; dt], of a convolution layer: [b; c; h]",
    "out_proj of Mamba or a convolution layer",
    "fc1_latent_proj, before the routed experts", "fc2_latent_proj, behind them",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "in_proj_qkvz: B is [q; k; v; z]", "in_proj_ba: B is [b; a]", "in_proj_qkv", "in_proj_z", "in_proj_b",
    "in_proj_a", "out_proj of linear attention",
    "per_layer_model_projection, which is outside layers: as of layer 0", "per_layer_input_gate",
    "per_layer_projection", "laurel.linear_left", "laurel.linear_right", "altup.modality_router",
    "altup.prediction_coefs", "altup.correction_coefs",
    "altup_projections.N, which are outside layers: N as of layer N",
    "altup_unembed_projections.N, which are outside layers: N as of layer N",
    "shared expert: up_proj and gate_proj: B is [up; gate]",
    "project_in, between the embedding and layer 0", "project_out, before the head",
)  # fmt: skip
"""Names in Hugging Face models of the matrix of each module id. TensorRT-LLM's converters use 5 for the gate
and 7 for the other one.
"""
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
# The shared expert's counterparts of the dense MLP's modules.
SHARED = {
    "mlp_h_to_4h": "shared_expert_h_to_4h",
    "mlp_4h_to_h": "shared_expert_4h_to_h",
    "mlp_gate": "shared_expert_gate",
    "mlp_gate_up": "shared_expert_gate_up",
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
        meant = {name, SHARED.get(name, name)} & known.keys()
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
    if name.startswith("project_"):
        return frozenset({0})
    if model.encoder is not None and name.startswith("cross_"):
        return frozenset(range(model.encoder.num_layers, model.num_layers))
    if name == "per_layer_model_projection":
        return frozenset((0,))
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
