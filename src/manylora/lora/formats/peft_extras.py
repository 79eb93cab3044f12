"""What a PEFT directory may hold beside low-rank matrices of linear layers: trained biases, embedding, head,
norms. Names and meanings of the extras made of them are those of `manylora.lora.extras`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.bounds import Bounds
from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.peft_classifier import CLASSIFIER, POOLER, read_classifier, read_pooler
from manylora.lora.formats.peft_config import PeftConfig
from manylora.lora.formats.peft_names import (
    LAYER,
    MODULE,
    ROOT,
    in_our_order,
    in_peft_order,
    layer_of,
    module_id_of,
)
from manylora.lora.formats.peft_shared import check_tokens, read_shared
from manylora.lora.formats.peft_stacks import (
    STACK_BIAS,
    STACK_NORM,
    check_stacks,
    encoder_layers,
    stack_layer,
    stack_module_id,
)
from manylora.lora.formats.peft_tables import (
    HEADS,
    SHARED,
    TABLE,
    Table,
    bias_scale,
    check_shape,
    is_whole_table,
    table_name,
    without_base,
)
from manylora.lora.formats.tensor_files import RawTensor, decode
from manylora.lora.modules import MODULE_NAMES, LoraModule
from manylora.lora.tensors import check_layer
from manylora.request import LoraExtra

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
