"""What a PEFT directory may hold beside low-rank matrices of linear layers: trained biases, embedding, head,
norms, and the classification head that PEFT saves with task_type SEQ_CLS and TOKEN_CLS.

Names and meanings of the extras made of them are those of `manylora.lora.extras`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.bounds import Bounds
from manylora.lora.extras import HEAD
from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.peft.module_tensors import (
    STACK_BIAS,
    STACK_NORM,
    check_stacks,
    encoder_layers,
    stack_layer,
    stack_module_id,
)
from manylora.lora.formats.peft.names import (
    LAYER,
    MODULE,
    ROOT,
    in_our_order,
    in_peft_order,
    layer_of,
    module_id_of,
)
from manylora.lora.formats.peft.settings import PeftConfig
from manylora.lora.formats.peft.tables import (
    HEADS,
    SHARED,
    TABLE,
    TABLES,
    Table,
    bias_scale,
    check_shape,
    check_tokens,
    is_whole_table,
    read_shared,
    table_name,
    without_base,
)
from manylora.lora.formats.tensor_files import RawTensor, decode
from manylora.lora.modules import MODULE_NAMES, LoraModule
from manylora.lora.tensors import check_dims, check_layer
from manylora.request import LoraExtra

CLASSIFIER = re.compile(
    rf"{ROOT}(?:score|(?P<pre>pre_)?classifier)\.(?:modules_to_save\.(?:default\.)?)?(?P<layer>dense\.|out_proj\.)?"
    r"(?P<part>weight|bias)"
)
"""Single layers, and the two of RoBERTa or DistilBERT; as PEFT names them since 0.3, and as checkpoints of
trainers do."""
POOLER = re.compile(
    rf"(?P<path>{ROOT}pooler\.dense)\.lora_(?P<part>[AB]\.weight|magnitude_vector(?:\.weight)?)"
)
"""A layer of BERT and its relatives that only a head of one layer reads. `all-linear` has it."""
MORE_TABLES = ("embeddings.word_embeddings", "embeddings.tok_embeddings")


def read_classifier(found: Mapping[str, RawTensor], base: BaseReader | None) -> list[LoraExtra]:
    """found: tensors whose names match CLASSIFIER. Any number of labels. Raises AdapterInvalidError."""
    parts: dict[str, tuple[str, RawTensor]] = {}
    for key, tensor in found.items():
        match = CLASSIFIER.fullmatch(key)
        assert match is not None
        first = match["layer"] == "dense." or match["pre"]
        name = f"{HEAD}.{'dense.' if first else ''}{match['part']}"
        if name in parts:
            raise AdapterInvalidError(f"{key} and {parts[name][0]} mean the same part of a head")
        parts[name] = key, tensor
    if not parts:
        return []
    hidden = None if base is None else _hidden_size(base)
    for stem in (f"{HEAD}.", f"{HEAD}.dense."):
        _check_layer(stem, parts, hidden)
    return [LoraExtra(name, decode(*part)) for name, part in sorted(parts.items())]


def read_pooler(
    found: Mapping[str, RawTensor],
    head: list[LoraExtra],
    config: PeftConfig,
    base: BaseReader | None,
    tell: Callable[[str], None],
) -> list[LoraExtra]:
    """A LoRA of the pooler, as the first of the head's two layers. found: tensors whose names match POOLER.
    head: the adapter's own, if it has one. Raises AdapterInvalidError.
    """
    parts = {match["part"]: tensor for key, tensor in found.items() if (match := POOLER.fullmatch(key))}
    if not parts:
        return []
    path = next(match["path"] for key in found if (match := POOLER.fullmatch(key)))
    if set(parts) != {"A.weight", "B.weight"}:
        raise AdapterInvalidError(f"{path}: a LoRA without DoRA is supported on this layer, with A and B")
    if base is None:
        raise AdapterInvalidError(f"{path} needs the base model: name it with --base")
    own = {one.name for one in head}
    theirs = {f"{HEAD}.{part}": base.find(f"classifier.{part}") for part in ("weight", "bias")}
    if f"{HEAD}.dense.weight" in own or not (own or theirs[f"{HEAD}.weight"]):
        tell(f"{path} is left out: nothing reads it in this model, neither embeddings nor its head")
        return []
    a, b = (decode(f"{path}.lora_{name}", parts[name]) for name in ("A.weight", "B.weight"))
    check_dims(path, a.shape, b.shape, None)
    weight = base.weight(path, a.shape[1], len(b)).numpy() + (b * np.float32(config.scale(path, len(a)))) @ a
    bias = base.find(f"{path}.bias")
    extras = [LoraExtra(f"{HEAD}.dense.weight", weight)]
    extras += [LoraExtra(f"{HEAD}.dense.bias", base.read(bias))] if bias else []
    if not own:
        extras += [LoraExtra(name, base.read(one)) for name, one in theirs.items() if one]
    return extras


def _check_layer(stem: str, parts: Mapping[str, tuple[str, RawTensor]], hidden: int | None) -> None:
    weight, bias = parts.get(f"{stem}weight"), parts.get(f"{stem}bias")
    if weight is None:
        if bias is not None or stem == f"{HEAD}.":
            raise AdapterInvalidError(f"{next(iter(parts.values()))[0]}: the head lacks {stem}weight")
        return
    key, tensor = weight
    if len(tensor.shape) != 2 or 0 in tensor.shape or (hidden is not None and tensor.shape[1] != hidden):
        raise AdapterInvalidError(
            f"{key} has shape {tensor.shape}: a head must have a row of {hidden or 'hidden_size'} values for "
            "each label; the adapter was made for another model"
        )
    if stem != f"{HEAD}." and tensor.shape[0] != tensor.shape[1]:
        raise AdapterInvalidError(f"{key} has shape {tensor.shape}: it must be square")
    if bias is not None and bias[1].shape != tensor.shape[:1]:
        raise AdapterInvalidError(f"{bias[0]} has shape {bias[1].shape}, {key} {tensor.shape}")


def _hidden_size(base: BaseReader) -> int | None:
    if project := base.find("embeddings_project.weight"):  # Electra's embedding is narrower
        return base.shape(project)[0]
    names = (base.find(f"{table}.weight") for table in (*TABLES, *MORE_TABLES))
    found = next(filter(None, names), None)
    return None if found is None else base.shape(found)[1]


BIAS = re.compile(MODULE + r"(?P<part>(?:base_layer|lora_B)\.bias|bias)")
NORM = re.compile(
    rf"(?P<path>{ROOT}(?:{LAYER}(?P<name>self_attn\.(?:[qk]_norm|q_a_layernorm|kv_a_layernorm)|\w*layernorm(?:_[12])?|ln_\w+|attention_norm|ffn_norm|norm"
    r"|post_per_layer_input_norm|laurel\.post_laurel_norm|altup\.router_norm)"
    r"|(?P<inputs>per_layer_projection_norm)|(?P<final>norm|norm_f|ln_f|final_layer_?norm)))\.(?P<part>weight|bias)"
)
Tensors = Mapping[str, RawTensor]
Modules = Mapping[int, LoraModule] | None


def is_extra(key: str) -> bool:
    """Whether PEFT's tensor of this name is, or is part of, an extra."""
    if found := BIAS.fullmatch(key):
        return module_id_of(found, None) is not None
    if CLASSIFIER.fullmatch(key) or POOLER.fullmatch(key):
        return True
    return bool(_stack_bias(key) or STACK_NORM.fullmatch(key) or NORM.fullmatch(key) or TABLE.fullmatch(key))


def check_extra_shapes(found: Tensors, bounds: Bounds) -> None:
    """found: the tensors that `is_extra`. Whole tables count when it is known that they are no copies of the
    base's, which are left out; their shapes are the base's. Raises AdapterInvalidError."""
    bounds.check_elements(sum(math.prod(t.shape) for key, t in found.items() if not is_whole_table(key)))


def read_extras(
    found: Tensors,
    tensors: Tensors,
    config: PeftConfig,
    modules: Modules,
    base: BaseReader | None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[LoraExtra]:
    """found: those of the adapter's tensors that `is_extra`; tensors: the others. base: None refuses all but
    biases of lora_B. tell: as of `ReadOptions`. Raises AdapterInvalidError."""
    biases: dict[str, dict[bool, np.ndarray]] = {}  # by whether they belong to lora_B
    extras: list[LoraExtra] = []
    tables: dict[tuple[str, str], dict[str, tuple[str, RawTensor]]] = {}
    heads = {key: tensor for key, tensor in found.items() if CLASSIFIER.fullmatch(key)}
    poolers = {key: tensor for key, tensor in found.items() if POOLER.fullmatch(key)}
    found = {key: tensor for key, tensor in found.items() if key not in heads | poolers}
    for key, tensor in sorted(found.items()):
        if match := _stack_bias(key) or BIAS.fullmatch(key):
            name, shift = _module_bias(match, key, tensor, tensors, config, modules, base)
            parts = biases.setdefault(name, {})
            if (of_b := match["part"] == "lora_B.bias") in parts:
                raise AdapterInvalidError(f"{key} and another tensor mean the same bias")
            parts[of_b] = shift
        elif match := STACK_NORM.fullmatch(key) or NORM.fullmatch(key):
            extras.append(_norm(match, key, tensor, modules, _known(key, base)))
        elif match := TABLE.fullmatch(key):
            part = match["part"].removesuffix(".weight") if "magnitude" in key else match["part"]
            where = table_name(match, modules), match["path"]
            tables.setdefault(where, {})[part] = (key, tensor)
    if len({kind for kind, _ in tables}) < len(tables):
        raise AdapterInvalidError(f"{' and '.join(path for _, path in tables)} belong to two models")
    for (name, path), found_here in tables.items():
        if name == SHARED:
            stacks = [parts for (other, _), parts in tables.items() if other.endswith(".embed")]
            extras += read_shared(path, found_here, stacks, config, _known(path, base))
        else:
            extras += Table(name, path, found_here, config, _known(path, base)).read()
    extras += [LoraExtra(name, np.sum(list(parts.values()), axis=0)) for name, parts in biases.items()]
    head = read_classifier(heads, base)
    extras += head + read_pooler(poolers, head, config, base, tell)
    _check(extras, modules, base)
    return extras


def _check(extras: list[LoraExtra], modules: Modules, base: BaseReader | None) -> None:
    """Refuse what has two meanings, or none."""
    names = {extra.name for extra in extras}
    if len(names) < len(extras):
        raise AdapterInvalidError("the adapter has two tensors for the same norm or matrix")
    if encoder_layers(modules):
        check_tokens(names)
        return
    tied = base is not None and not any(base.find(f"{head}.weight") for head in HEADS)
    if tied and "embed.tokens" in names and names & {"head.weight", "head.magnitude"}:
        raise AdapterInvalidError(
            "the base model's head is its embedding: trainable_token_indices beside a head that is saved or "
            "has DoRA mean nothing in PEFT either"
        )


def _stack_bias(key: str) -> re.Match[str] | None:
    found = STACK_BIAS.fullmatch(key)
    return found if found and stack_module_id(found) is not None else None


def _known(key: str, base: BaseReader | None) -> BaseReader:
    if base is None:
        raise AdapterInvalidError(
            f"{key} is relative to the base model, which is not known here: name it with --base, or serve "
            "the directory"
        )
    return base


def _module_bias(
    match: re.Match[str],
    key: str,
    tensor: RawTensor,
    tensors: Tensors,
    config: PeftConfig,
    modules: Modules,
    base: BaseReader | None,
) -> tuple[str, np.ndarray]:
    """An extra's name, and what it adds [out], in our order."""
    path = match["path"]
    if match.re is STACK_BIAS:
        module_id, layer = stack_module_id(match), stack_layer(key, match, modules)
    else:
        module_id, layer = module_id_of(match, modules), layer_of(match)
        check_stacks([key], modules)
    assert module_id is not None
    module = None
    if modules and module_id in modules:
        check_layer(key, modules[module_id], layer)
        module = modules[module_id].at(layer)
    if len(tensor.shape) != 1 or (module is not None and tensor.shape[0] != module.out_dim):
        raise AdapterInvalidError(
            f"{key} has shape {tensor.shape}"
            + (f", {module.name} of this model gives {module.out_dim} values" if module else "")
        )
    values = in_peft_order(path, module_id, decode(key, tensor), module)
    if match["part"] == "lora_B.bias":
        shift = values * bias_scale(path, f"{path}.lora_A.weight", tensors, config)
    else:
        shift = without_base(f"{path}.bias", values, _known(key, base))
    name = f"layers.{layer}.{MODULE_NAMES[module_id]}.bias"
    return name, in_our_order(path, module_id, shift, module)


def _norm(match: re.Match[str], key: str, tensor: RawTensor, modules: Modules, base: BaseReader) -> LoraExtra:
    name = base.find(key)
    if name is None:
        raise AdapterInvalidError(f"{key}: the base model has no such norm")
    check_shape(key, tensor.shape, base)
    values = decode(key, tensor)
    shift = without_base(key, values, base)
    if match.re is STACK_NORM:
        stack = f"{match['stack']}." if encoder_layers(modules) else ""
        own = f"{stack}{'norm' if match['final'] else 'embedding_norm'}"
        number = stack_layer(key, match, modules) if match["layer"] else None
    else:
        own, number = match["inputs"] or "norm", int(match["layer"]) if match["layer"] else None
        check_stacks([key], modules)
    where = own if number is None else f"layers.{number}.{match['name']}"
    return LoraExtra(f"{where}.{match['part']}", shift if match["part"] == "bias" else values)
