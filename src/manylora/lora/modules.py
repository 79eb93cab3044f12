"""The LoRA modules: ids (TensorRT-LLM loraModule.h), names, dimensions, and what tensor parallelism cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum

from manylora.config.blocks import ConvConfig, DeltaConfig, LatentConfig, LayerShape, Mamba2Config
from manylora.config.engine import ModelConfig
from manylora.errors import ConfigError
from manylora.kernels.row_format import RowFormat


class LoraModuleId(IntEnum):
    """TensorRT-LLM's numbers, from 26 on our own; the name of a module is its member's in small letters."""

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
    # Of recurrent layers; TensorRT-LLM has none of these.
    LINEAR_ATTN_QKVZ = 30
    LINEAR_ATTN_BA = 31
    LINEAR_ATTN_QKV = 32
    LINEAR_ATTN_Z = 33
    LINEAR_ATTN_B = 34
    LINEAR_ATTN_A = 35
    LINEAR_ATTN_OUT = 36
    # Of per-layer embeddings; the first is outside layers, and its rows are those of layer 0.
    PER_LAYER_MODEL_PROJECTION = 37
    PER_LAYER_INPUT_GATE = 38
    PER_LAYER_PROJECTION = 39
    # Of Laurel and AltUp. The last two are outside layers: projection N has the rows of layer N.
    LAUREL_LEFT = 40
    LAUREL_RIGHT = 41
    ALTUP_MODALITY_ROUTER = 42
    ALTUP_PREDICTION_COEFS = 43
    ALTUP_CORRECTION_COEFS = 44
    ALTUP_PROJECTIONS = 45
    ALTUP_UNEMBED_PROJECTIONS = 46
    SHARED_EXPERT_GATE_UP = 47
    # Around all layers; their rows are those of layer 0.
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
"""What Hugging Face models call the matrix of each module id. TensorRT-LLM's converters write 5 for
the gate and 7 for the other one."""
MODULE_NAMES = tuple(one.name.lower() for one in LoraModuleId)
"""Name of each module id."""
EXPERT_IDS = (LoraModuleId.MOE_H_TO_4H, LoraModuleId.MOE_4H_TO_H, LoraModuleId.MOE_GATE)
"""Modules of routed experts: one row holds the matrices of all experts of a layer."""

QKV = {"attn_q", "attn_k", "attn_v"}  # one group: naming one enables all three
KV = ("attn_qkv", "attn_k", "attn_v")  # not of layers that read another one's keys and values
# Another; queries read the decoder's rows, keys and values the encoder's, so the fused one is kept as these.
CROSS = {"cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v"}
# A fused module is available when all the modules it fuses are.
FUSED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "mlp_gate_up": ("mlp_gate", "mlp_h_to_4h"),
    "cross_attn_qkv": ("cross_attn_q", "cross_attn_k", "cross_attn_v"),
    "shared_expert_gate_up": ("shared_expert_gate", "shared_expert_h_to_4h"),
    "linear_attn_qkvz": ("linear_attn_qkv", "linear_attn_z"),
    "linear_attn_ba": ("linear_attn_b", "linear_attn_a"),
}
# The shared expert's counterparts of the plain MLP's modules.
SHARED = {
    "mlp_h_to_4h": "shared_expert_h_to_4h",
    "mlp_4h_to_h": "shared_expert_4h_to_h",
    "mlp_gate": "shared_expert_gate",
    "mlp_gate_up": "shared_expert_gate_up",
}


RECURRENT = ("linear_attn_", "mamba_")  # begin the names of modules of recurrent layers


class Split(Enum):
    """What tensor parallelism cuts: rows of B, columns of A, or nothing."""

    B_ROWS = "B rows"
    A_COLS = "A cols"
    NONE = "none"


@dataclass(frozen=True)
class LoraModule:
    """A [rank, in_dim] and B [out_dim, rank], sizes over all ranks.

    counted: whether it takes part in the page geometry. Fused modules beside their parts do not: they would
             double the size of a page without ever being used together with them.
    parts:   of a module of several parts, as a fused one, the sizes whose sum out_dim is; ranks cut each of
             them. Of a routed-expert module, each expert's.
    groups, transposed: how a checkpoint keeps the base's matrix: as so many stacks of the parts one after
             another, and [in, out].
    experts: > 1: the dimensions are of all experts together; A is [experts, rank, in_dim / experts] and B
             [experts, out_dim / experts, rank].
    layers:  that have the module; None: every one.
    others:  the module with the sizes that it has on other layers, which are `layers` of each. The sizes of
             this one are the largest. Empty: all layers are alike.
    encoder_layers: of the model; they come before its decoder's. 0: there is no encoder.
    gate_first: whether PEFT directories have a fused gate and up as PEFT trains them, [gate; up].
    gated: whether the model's MLPs have a gate.
    interleaved: of routed experts, whether the rows of PEFT's fused gate and up are those of either in turn.
    named_decoder: whether PEFT's names of the layers begin with `decoder.`, though there is no encoder.
    unused: layers without the module for which adapters may have it all the same: what it gave there in
            training, generation never reads.
    layer_inputs: whether the model has per-layer embeddings.
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
    others: tuple[LoraModule, ...] = ()

    def at(self, layer: int) -> LoraModule:
        """With the sizes of this layer."""
        return next((one for one in self.others if one.layers and layer in one.layers), self)

    def is_on(self, layer: int) -> bool:
        """Whether this layer has the module."""
        return self.layers is None or layer in self.layers

    def forms(self, count: int) -> list[tuple[LoraModule, int]]:
        """With each of its sizes, and on how many of so many layers it has these."""
        others = [(one, len(one.layers or ())) for one in self.others]
        return [(self, count - sum(number for _, number in others)), *others]

    @property
    def name(self) -> str:
        return MODULE_NAMES[self.module_id]

    def local_in(self, tp: int = 1) -> int:
        return self.in_dim // tp if self.split is Split.A_COLS else self.in_dim

    def local_out(self, tp: int = 1) -> int:
        return self.out_dim // tp if self.split is Split.B_ROWS else self.out_dim

    def share(self, tp: int) -> LoraModule:
        """The module of one of `tp` ranks, which share every part of it. Raises ConfigError when they cannot
        do so equally."""
        parts = self.parts or (self.out_dim,)
        sizes = {Split.NONE: (), Split.B_ROWS: parts, Split.A_COLS: (self.in_dim // self.experts,)}
        for size in sizes[self.split]:
            if size % tp:
                raise ConfigError(
                    f"{self.name} has a dimension of {size}, which {tp} ranks cannot share equally"
                )
        if self.split is Split.B_ROWS:
            parts = tuple(part // tp for part in self.parts)
            return replace(self, out_dim=self.local_out(tp), parts=parts)
        return replace(self, in_dim=self.local_in(tp))

    def row_sizes(self, row: RowFormat, tp: int = 1) -> tuple[int, int, int]:
        """Numbers of A, of B and of the magnitude, on one rank of `tp`."""
        return row.sizes(self.local_in(tp), self.local_out(tp))

    def row_elements(self, row: RowFormat, tp: int = 1) -> int:
        """All numbers of a row, on one rank of `tp`."""
        return sum(self.row_sizes(row, tp))


def module_name(module_id: int) -> str:
    """For error texts: of any number, also one that is no module's."""
    return MODULE_NAMES[module_id] if 0 <= module_id < len(MODULE_NAMES) else f"INVALID ({module_id})"


def lora_modules(model: ModelConfig, names: tuple[str, ...] = ()) -> dict[int, LoraModule]:
    """The modules an adapter may use on this model, by id. Empty names: every module the model has.

    attn_dense reads the attention's output, so its in_dim is heads * head_dim, which need not be hidden_size.
    A name of the plain MLP means the shared expert too, where there is one. Raises ConfigError for a name the
    model has no module for.
    """
    kinds: dict[LayerShape | None, list[int]] = {}
    for layer, shape in enumerate(model.layer_shapes or (None,) * model.num_layers):
        kinds.setdefault(shape, []).append(layer)
    shaped = [model.of_layer(layers[0]) for layers in kinds.values()]
    known = {name: None for one in shaped for name in _dims(one)}
    wanted = {name for given in names for name in _find_targets(given, known)} or set(known)
    if wanted & QKV:
        wanted |= QKV
    if wanted & CROSS:
        wanted |= CROSS & known.keys()
    if len(kinds) == 1:
        return _modules(shaped[0], wanted)
    found: dict[int, list[LoraModule]] = {}
    for one, numbers in zip(shaped, kinds.values(), strict=True):
        for module_id, module in _modules(one, wanted).items():
            own = frozenset(numbers) if module.layers is None else module.layers & frozenset(numbers)
            if own:
                found.setdefault(module_id, []).append(replace(module, layers=own))
    return {module_id: _together(forms, model.num_layers) for module_id, forms in sorted(found.items())}


def join_layers(forms: Mapping[int, LoraModule], num_layers: int) -> LoraModule:
    """One module of what it is on each of some layers, of so many."""
    return _together([replace(one, layers=frozenset({n}), others=()) for n, one in forms.items()], num_layers)


def _together(forms: list[LoraModule], num_layers: int) -> LoraModule:
    """One module of what it is on different layers."""
    sized: dict[tuple[int, int], LoraModule] = {}
    for one in forms:
        known = sized.get((one.in_dim, one.out_dim))
        layers = (one.layers or frozenset()) | ((known.layers or frozenset()) if known else frozenset())
        sized[one.in_dim, one.out_dim] = replace(one, layers=layers)
    every = frozenset(layer for one in sized.values() for layer in one.layers or ())
    largest, *others = sorted(sized.values(), key=lambda one: -one.in_dim - one.out_dim)
    return replace(largest, layers=None if len(every) == num_layers else every, others=tuple(others))


def _dims(model: ModelConfig) -> dict[str, tuple[int, int, Split]]:
    """Inputs and outputs of each module, of a model whose layers are alike."""
    dims = {**_dense_dims(model), **_recurrent_dims(model), **_moe_dims(model)}
    dims |= {**_layer_input_dims(model), **_altup_dims(model)}
    if model.encoder is not None:
        dims |= {f"cross_{name}": sizes for name, sizes in _attention_dims(model).items()}
    return dims


def _modules(model: ModelConfig, wanted: set[str]) -> dict[int, LoraModule]:
    dims, grouped = _dims(model), _grouped_parts(model)
    found: dict[int, LoraModule] = {}
    for name, (in_dim, out_dim, split) in dims.items():
        fused = FUSED.get(name, ())
        if name in wanted or (fused and wanted.issuperset(fused)):
            module_id = LoraModuleId[name.upper()]
            experts = model.moe.num_experts if model.moe and module_id in EXPERT_IDS else 1
            found[module_id] = LoraModule(
                module_id,
                in_dim * experts,
                out_dim * experts,
                split,
                counted=not (fused and wanted.issuperset(fused)),
                parts=grouped[name][1]
                if name in grouped
                else tuple(dims[part][1] for part in fused) or (out_dim,) * (experts if experts > 1 else 0),
                groups=grouped[name][0] if name in grouped else 1,
                transposed=model.moe.transposed if model.moe and experts > 1 else model.transposed_weights,
                experts=experts,
                layers=_layers(name, model),
                encoder_layers=model.encoder.num_layers if model.encoder else 0,
                gated=model.gated_mlp,
                interleaved=model.moe is not None and model.moe.interleaved,
                named_decoder=model.architecture == "OPTForCausalLM",
                unused=model.kv_readers if name in KV else frozenset(),
                layer_inputs=model.layer_inputs is not None,
            )
    return found


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
    if model.keys_are_values:  # an adapter of the one changes the other
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
    """What all heads share, tensor parallelism does not cut."""
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


def _grouped_parts(model: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Of modules whose rows are of several parts, which a checkpoint may have in groups: how many groups, and
    the parts."""
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


def _moe_dims(model: ModelConfig) -> dict[str, tuple[int, int, Split]]:
    """Of routed experts, those of one expert."""
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


def _find_targets(name: str, dims: Mapping[str, object]) -> set[str]:
    """The modules that a target's name means on a model with these modules."""
    found = {name, SHARED.get(name, name)} & dims.keys()
    if not found:
        raise ConfigError(f"Invalid LoRA module {name}: this model has {', '.join(dims)}")
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
