"""Names of the tensors of a PEFT directory: which linear layer, routed expert or extra each belongs to.

A decoder's layers are named by `MODULE`. Encoder-decoder models have two stacks of layers in one numbering,
the encoder's first, and are named by `STACK_MODULE`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from manylora.adapters.formats.tensor_files import RawTensor
from manylora.adapters.modules import EXPERT_IDS, LoraModule
from manylora.adapters.modules import LoraModuleId as Id
from manylora.errors import AdapterInvalidError

Modules = Mapping[int, LoraModule] | None
"""The model's modules by id; None: the model is not known."""

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
CONV_IDS = {"in_proj": Id.MAMBA_IN_PROJ, "out_proj": Id.MAMBA_OUT_PROJ}
MIXER_IDS = ATTENTION_IDS | MLP_IDS | CONV_IDS  # whatever a layer of Nemotron-H is
MIXER_IDS |= {"fc1_latent_proj": Id.MOE_LATENT_FC1, "fc2_latent_proj": Id.MOE_LATENT_FC2}
# Names under which some families stack [q; k; v], or such parts, once for each group of heads, others once.
GROUPED = ("query_key_value", "wqkv", "in_proj_qkvz", "in_proj_ba")
STACK_ATTENTION_IDS = {
    "q_proj": Id.ATTN_Q, "k_proj": Id.ATTN_K, "v_proj": Id.ATTN_V,
    "out_proj": Id.ATTN_DENSE, "q": Id.ATTN_Q, "k": Id.ATTN_K,
    "v": Id.ATTN_V, "o": Id.ATTN_DENSE,
}  # fmt: skip
STACK_MLP_IDS = {
    "fc1": Id.MLP_H_TO_4H, "fc2": Id.MLP_4H_TO_H, "wi": Id.MLP_H_TO_4H,
    "wi_0": Id.MLP_H_TO_4H, "wi_1": Id.MLP_GATE, "wo": Id.MLP_4H_TO_H,
}  # fmt: skip
H_TO_4H, DOWN, GATE = EXPERT_IDS
EXPERT_NAMES = {
    "w1": H_TO_4H, "w2": DOWN, "w3": GATE, "gate_proj": H_TO_4H, "down_proj": DOWN, "up_proj": GATE,
}  # fmt: skip
EXPERT_LISTS = {"gate_up_projs": H_TO_4H, "down_projs": DOWN}
"""Unsloth's names of gpt-oss's linear layers, whose number comes last; gate and up in turn in one of them."""
EXPERT_PATHS = {
    prefix + name: module_id
    for prefix in ("", "mlp.experts.", "block_sparse_moe.experts.", "feed_forward.experts.", "mixer.experts.")
    for name, module_id in EXPERT_NAMES.items()
}
"""What a configuration may call the modules: their names, or their paths without the expert's number."""
EXPERT_PARAMETERS = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
"""Granite's, each a module with the matrices of all experts in transformers 4."""

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
"""path: the module's; mlp, linear, conv, shared, mixer: of the MLP, of a recurrent layer, of Granite's shared
expert, of a layer of Nemotron-H, else of attention; own: of the layer itself; outside: of no layer."""
STACK = r"(?P<path>(?:(?:base_model|model)\.)*(?P<stack>encoder|decoder)\."
STACK_LAYER = r"(?:layers|block)\.(?P<layer>\d{1,5})\."
STACK_MODULE = (
    rf"{STACK}(?:(?P<project>project_in|project_out)|{STACK_LAYER}(?:layer\.\d\.)?"
    r"(?:(?P<attention>self_attn|SelfAttention)\.|(?P<cross>encoder_attn|EncDecAttention)\.|"
    r"DenseReluDense\.)?(?P<name>\w+)))\."
)
"""project: of OPT's layers around all others."""
LORA = r"(?:lora_(?P<part>[AB])\.weight|lora_magnitude_vector(?:\.weight)?|weight_m_wdecomp\.weight)"
"""part: A or B, None for a DoRA magnitude as PEFT or NVlabs name it."""
EXPERT_KEY = re.compile(
    r"(?P<path>(?P<root>(?:(?:base_model|model|language_model|backbone)\.)*)"
    r"layers\.(?P<layer>\d{1,5})\.(?:(?:mlp|block_sparse_moe|feed_forward|mixer)\.)?"
    rf"(?:experts\.(?P<expert>\d{{1,5}})\.(?P<name>{'|'.join(EXPERT_NAMES)})"
    rf"|experts\.(?P<list>{'|'.join(EXPERT_LISTS)})\.(?P<number>\d{{1,5}})"
    rf"|(?P<stacked>experts(?:\.base_layer)?|{'|'.join(EXPERT_PARAMETERS)})))\.{LORA}"
)
"""expert and name, or list and number: of one expert; stacked: of all experts."""
SIDE = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
DORA = re.compile(r"lora_magnitude_vector|weight_m_wdecomp")  # in the keys of DoRA's magnitudes
VISION = re.compile(
    r"(?:^|\.)(?:vision_\w+|visual|image_\w+|audio_\w+|embed_(?:vision|audio)|multi_modal_projector"
    r"|mm_projector)\."
)
"""In the name of a tensor that belongs to the vision or audio part of a multimodal model."""

EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings")
HEADS = ("lm_head", "embed_out", "output")
SHARED = "shared"
TABLE = re.compile(
    rf"(?P<path>{ROOT}(?:(?:(?P<stack>encoder|decoder)\.)?(?P<embed>{'|'.join(EMBEDDINGS)})"
    rf"|(?P<shared>{SHARED})|(?P<head>{'|'.join(HEADS)})))\."
    r"(?P<part>weight|bias|base_layer\.weight|base_layer\.bias|lora_embedding_[AB]|lora_[AB]\.weight"
    r"|lora_B\.bias|lora_magnitude_vector(?:\.weight)?|token_adapter\.trainable_tokens_delta)"
)
"""An embedding or a head. embed, shared or head: its name. stack: of an encoder-decoder model."""
NORM = re.compile(
    rf"(?P<path>{ROOT}(?:{LAYER}(?P<name>self_attn\.(?:[qk]_norm|q_a_layernorm|kv_a_layernorm)"
    r"|\w*layernorm(?:_[12])?|ln_\w+|attention_norm|ffn_norm|norm"
    r"|post_per_layer_input_norm|laurel\.post_laurel_norm|altup\.router_norm)"
    r"|(?P<inputs>per_layer_projection_norm)|(?P<final>norm|norm_f|ln_f|final_layer_?norm)))\.(?P<part>weight|bias)"
)
STACK_NORM = re.compile(
    rf"{STACK}(?:{STACK_LAYER}(?P<name>layer\.\d\.layer_norm|\w+_layer_norm)"
    r"|(?P<final>final_layer_norm)|layernorm_embedding))\.(?P<part>weight|bias)"
)
"""final: of the stack's output; neither that nor a name: of its input."""
CLASSIFIER = re.compile(
    rf"{ROOT}(?:score|(?P<pre>pre_)?classifier)\.(?:modules_to_save\.(?:default\.)?)?"
    r"(?P<layer>dense\.|out_proj\.)?(?P<part>weight|bias)"
)
"""Single layers, and the two of RoBERTa or DistilBERT; as PEFT names them since 0.3, and as checkpoints of
trainers do."""
POOLER = re.compile(
    rf"(?P<path>{ROOT}pooler\.dense)\.lora_(?P<part>[AB]\.weight|magnitude_vector(?:\.weight)?)"
)
"""A layer of BERT and its relatives that only a head of one layer reads. `all-linear` has it."""

VISION_REASON = (
    "of the model's vision or audio part, which is not served: set lora_text_only (--lora-text-only) to "
    "leave that out and serve the text part alone"
)
REFUSED_KEYS = (
    (VISION, VISION_REASON),
    (re.compile(r"wpe.*\.lora_"), "adapters on the position embedding are not supported"),
    (
        re.compile(r"embed_tokens_per_layer\."),
        "adapters on the table of per-layer embeddings are not supported: train without it",
    ),
    (
        re.compile(r"\.(?:linear_attn|conv|mamba|mixer(?=\.(?:conv1d|norm|A_log|D|dt_bias)))\.(?!.*\.lora_)"),
        "of a recurrent layer only the linear layers can be adapted: train without this",
    ),
    (DORA, "this DoRA magnitude belongs to no known LoRA module"),
    (
        re.compile(r"^(?!.*\.lora_)"),
        "full weights and biases of this module are not supported: of modules_to_save the embedding, the "
        "head and norms are",
    ),
)
"""Why a tensor that belongs to no linear layer is refused: the first pattern that is found decides."""
NOT_KNOWN = "no such LoRA module is known"


@dataclass(frozen=True)
class ModuleName:
    """The parsed name of a linear layer's tensor.

    part: which tensor of the layer at `path`, as the group `part` of its pattern matched. module_id: None: no
    adaptable linear layer has this name. number: of the layer, within its stack if it is in one. stack:
    encoder, decoder or None.
    """

    key: str
    path: str
    part: str | None
    module_id: Id | None
    number: int
    root: str = ""
    stack: str | None = None

    def layer(self, modules: Modules) -> int:
        """The layer's number in the model, counted through both stacks. Raises AdapterInvalidError if a model
        with these modules has no such name."""
        if self.stack is None:
            check_stacks([self.key], modules)
            return self.number
        return stack_layer(self.key, self.stack, self.number, modules)

    def module(self, modules: Modules) -> LoraModule | None:
        """The model's module, with the sizes of this layer; None: not known."""
        known = modules.get(self.module_id) if modules and self.module_id is not None else None
        return None if known is None else known.at(self.number)


class ModuleNames:
    """The names of one kind of tensor of linear layers. part: pattern for what follows the layer's path."""

    def __init__(self, part: str) -> None:
        self._of_layer, self._of_stack = re.compile(MODULE + part), re.compile(STACK_MODULE + part)

    def find(self, key: str, modules: Modules = None) -> ModuleName | None:
        """None: this is the name of another tensor."""
        if match := self._of_layer.fullmatch(key):
            number = int(match["layer"] or match["number"] or 0)  # numbers outside layers mean the same
            module_id = _module_id(match, modules)
            return ModuleName(key, match["path"], match["part"], module_id, number, match["root"])
        if match := self._of_stack.fullmatch(key):
            number = int(match["layer"] or 0)
            if match["project"]:
                module_id = Id[match["project"].upper()]
            else:
                attention = match["attention"] or match["cross"]
                module_id = (STACK_ATTENTION_IDS if attention else STACK_MLP_IDS).get(match["name"])
                if module_id is not None and match["cross"]:
                    module_id = Id[f"CROSS_{module_id.name}"]
            return ModuleName(key, match["path"], match["part"], module_id, number, stack=match["stack"])
        return None


LORA_NAMES = ModuleNames(LORA)


def module_of(path: str, modules: Modules) -> LoraModule | None:
    """The model's module at `path`; None: not known."""
    name = LORA_NAMES.find(f"{path}.lora_A.weight", modules)
    return None if name is None else name.module(modules)


BIAS_NAMES = ModuleNames(r"(?P<part>(?:base_layer|lora_B)\.bias|bias)")


def _module_id(match: re.Match[str], modules: Modules) -> Id | None:
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


def is_extra(key: str) -> bool:
    """Whether a tensor of this name is, or is part of, an extra."""
    bias = BIAS_NAMES.find(key)
    if bias is not None and (bias.stack is None or bias.module_id is not None):
        return bias.module_id is not None
    return any(pattern.fullmatch(key) for pattern in (TABLE, NORM, STACK_NORM, CLASSIFIER, POOLER))


def is_whole_table(key: str) -> bool:
    """Whether a tensor of this name is all of an embedding or a head."""
    match = TABLE.fullmatch(key)
    return match is not None and match["part"] in ("weight", "base_layer.weight")


@dataclass
class ModuleTensors:
    """The tensors of one linear layer. path: of the layer. keys, tensors: by part, which is A, B or
    magnitude. vectors: as in `LoraForm`, if it shares A and B with others."""

    path: str
    keys: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, RawTensor] = field(default_factory=dict)
    vectors: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def size(self) -> int:
        """The number of elements of its row, without shared matrices."""
        if self.vectors is not None:
            return sum(one.size for one in self.vectors)
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def tensors_by_module(
    tensors: Mapping[str, RawTensor], partial: list[str] | None, modules: Modules
) -> dict[tuple[int, int], ModuleTensors]:
    """The tensors of each (layer, module id). tensors: without extras and routed experts.

    partial: a list that receives a line for each key that is left out; None: such keys are refused. Raises
    AdapterInvalidError.
    """
    names = {key: LORA_NAMES.find(key, modules) for key in sorted(tensors)}
    check_stacks((key for key in tensors if (name := names[key]) and name.stack is None), modules)
    seen = [key for key in names if VISION.search(key)]
    if seen and partial is None:
        rest = f" and {len(seen) - 1} other tensors are " if len(seen) > 1 else " is "
        raise AdapterInvalidError(f"{seen[0]}{rest}{VISION_REASON}")
    found: dict[tuple[int, int], ModuleTensors] = {}
    roots: dict[str, str] = {}
    for key, name in names.items():
        if name is None or name.module_id is None:
            if name is not None and name.stack is not None:
                raise AdapterInvalidError(f"{key}: {NOT_KNOWN}")
            reason = next((text for pattern, text in REFUSED_KEYS if pattern.search(key)), NOT_KNOWN)
            # A module without its magnitude would be another adapter, so a magnitude may not be left out.
            if partial is None or (DORA.search(key) and not VISION.search(key)):
                raise AdapterInvalidError(f"{key}: {reason}")
            partial.append(f"no match {key}: {reason}")
            continue
        if name.stack is None:
            roots.setdefault(name.root, key)
        layer = name.number if name.stack is None else name.layer(modules)
        parts = found.setdefault((layer, name.module_id), ModuleTensors(name.path))
        part = name.part or "magnitude"
        if part in parts.keys:
            raise AdapterInvalidError(f"{key} and {parts.path} mean the same module")
        parts.keys[part], parts.tensors[part] = key, tensors[key]
    if len(roots) > 1:
        raise AdapterInvalidError(f"{' and '.join(roots.values())} belong to two models")
    return found


def check_stacks(keys: Iterable[str], modules: Modules) -> None:
    """keys: names of layers outside both stacks. Raises AdapterInvalidError if there are any and the model
    has two stacks."""
    key = next(iter(keys), None)
    if key is not None and encoder_layers(modules):
        raise AdapterInvalidError(
            f"{key} names neither encoder nor decoder: the adapter was made for another model"
        )


def encoder_layers(modules: Modules) -> int:
    """The number of encoder layers; 0 without an encoder or if the model is not known."""
    return max((module.encoder_layers for module in (modules or {}).values()), default=0)


def is_named_decoder(modules: Modules) -> bool:
    """Whether this is a decoder-only model whose names begin with `decoder.`, as OPT's do."""
    return any(module.named_decoder for module in (modules or {}).values())


def stack_layer(key: str, stack: str, layer: int, modules: Modules) -> int:
    """The number of a stack's layer, counted through both stacks. Raises AdapterInvalidError."""
    if modules is None:
        raise AdapterInvalidError(
            f"{key}: a decoder's layers are numbered after its encoder's, and how many these are depends on "
            "the base model, which is not known here: name it, or convert the adapter with "
            "`manylora convert --base`"
        )
    count = encoder_layers(modules)
    if stack == "decoder" and is_named_decoder(modules):
        return layer
    if not count:
        raise AdapterInvalidError(f"{key} belongs to an encoder-decoder model; this model has no encoder")
    if stack == "decoder":
        return count + layer
    if layer >= count:
        raise AdapterInvalidError(f"{key}: the encoder of this model has {count} layers")
    return layer


def in_our_order(path: str, module_id: int, rows: np.ndarray, module: LoraModule | None) -> np.ndarray:
    """Reorder rows [out] or [out, n] from PEFT's order to that of the tensor format. module: the model's;
    None: not known. Raises AdapterInvalidError."""
    if module_id in GATE_UP_IDS:
        return _swap_halves(path, rows)
    if not path.endswith(GROUPED):
        return rows
    if module is None:
        raise AdapterInvalidError(
            f"{path}: the order of its rows depends on the base model, which is not known here: name its "
            "directory (--base in `manylora convert` and tools/hf_lora_convert.py), or send converted tensors"
        )
    # The base stores these rows as [q; k; v] for each group of heads; the tensor format stores them once.
    stacks = rows.reshape(module.groups, -1, *rows.shape[1:])
    ends = np.cumsum([part // module.groups for part in module.parts])[:-1]
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in np.split(stacks, ends, axis=1)])


def in_peft_order(path: str, module_id: int, rows: np.ndarray, module: LoraModule | None) -> np.ndarray:
    """Reorder rows [out] or [out, n] from the file's order to PEFT's, which is that of the base's matrix.
    They differ if the halves of a fused gate and up were swapped in the file. Raises AdapterInvalidError."""
    swapped = module_id in GATE_UP_IDS and module is not None and not module.gate_first
    return _swap_halves(path, rows) if swapped else rows


def _swap_halves(path: str, rows: np.ndarray) -> np.ndarray:
    """Between PEFT's [gate; up] and the tensor format's [up; gate]."""
    half, odd = divmod(len(rows), 2)
    if odd:
        raise AdapterInvalidError(f"{path}: the fused gate and up must have an even number of rows")
    return np.concatenate((rows[half:], rows[:half]))
