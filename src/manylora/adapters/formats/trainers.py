"""What other trainers write under PEFT's names: routed experts in stacks (Tinker, Megatron-Bridge, NeMo
AutoModel, mlx-lm), and parts of layers that are one in the model (Tinker)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from manylora.adapters.formats.peft import names
from manylora.adapters.formats.peft.experts import check_order_known
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.tensor_files import RawTensor, decode
from manylora.errors import AdapterInvalidError

MATRIX = re.compile(
    rf"(?P<head>.+\.experts)\.(?:(?P<number>\d{{1,5}})\.)?(?P<name>gate_up_proj|{'|'.join(names.EXPERT_NAMES)})"
    r"\.(?P<part>lora_[AB]\.weight)"
)
"""number: of one expert; None: a stack of all, [experts, r, in] or [experts, out, r], or [1, ...] of what
they share."""
AUTOMODEL = re.compile(r"(?P<path>.+\.experts)\.lora_(?P<name>gate_and_up|down)_(?P<side>[AB])")
"""Of NeMo AutoModel: A [experts, in, r] and B [experts, r, out]."""
PACKED = re.compile(r".+\.experts(?:\.base_layer)?\.lora_(?P<side>[AB])\.weight")
"""PEFT's matrices of all experts; Megatron-Bridge writes A as [experts, r, in] and B as [out, r, experts]."""
SPLIT = re.compile(
    r"(?P<path>.+\.(?:linear_attn\.in_proj_(?=[qkv]\.)|mixer\.(?=(?:gate_proj|x_proj)\.)))(?P<part>\w+)"
    r"\.(?P<side>lora_[AB]\.weight)"
)
"""Of Tinker: matrices of parts of a layer. Nemotron-H's MLP has no gate_proj."""
FUSED = {"q": ("qkv", ("q", "k", "v")), "gate_proj": ("in_proj", ("gate_proj", "x_proj"))}
"""By the first part: the layer's name, and the parts in the order of its rows, whose last may have none."""


def is_foreign(tensors: Mapping[str, RawTensor]) -> bool:
    """Whether `in_peft_form` has something to change."""
    return any(len(tensor.shape) == 3 or SPLIT.fullmatch(key) for key, tensor in tensors.items())


def in_peft_form(
    settings: Mapping[str, Any], tensors: Mapping[str, RawTensor], options: ReadOptions
) -> tuple[Mapping[str, Any], dict[str, RawTensor]]:
    """The settings, and the matrices of each expert and each layer by PEFT's names for linear layers. Other
    tensors are kept. Raises AdapterInvalidError."""
    modules, base = options.modules or {}, str(settings.get("base_model_name_or_path"))
    gated = names.H_TO_4H not in modules or modules[names.H_TO_4H].gated
    known = modules.get(names.DOWN)
    found: dict[str, RawTensor] = {}
    stacks: dict[tuple[str, str], dict[str, RawTensor]] = defaultdict(dict)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for key, tensor in tensors.items():
        if (native := AUTOMODEL.fullmatch(key)) and len(tensor.shape) == 3:
            fused = "gate_up_proj" if gated else "up_proj"
            name = fused if native["name"] == "gate_and_up" else "down_proj"
            tensor, key = tensor.turned(key), f"{native['path']}.{name}.lora_{native['side']}.weight"
        if (packed := PACKED.fullmatch(key)) and len(tensor.shape) == 3:
            first, second, third = tensor.shape
            shape = (first * second, third) if packed["side"] == "A" else (first, second * third)
            tensor = replace(tensor, shape=shape)
        match = MATRIX.fullmatch(key)
        if match is None or (match["number"] is None and len(tensor.shape) != 3):
            found[key] = tensor
            continue
        place = match["head"], match["name"]
        if match["number"] is not None:
            found[key] = tensor
            counts[place] = max(counts[place], int(match["number"]) + 1)
        elif match["part"] in stacks[place]:
            raise AdapterInvalidError(f"{key} means a tensor that another name means too")
        else:
            stacks[place][match["part"]] = tensor
            counts[place] = max(counts[place], tensor.shape[0])
    for (head, name), parts in stacks.items():
        if all(0 in tensor.shape for tensor in parts.values()):  # Tinker's, of a gate that the model lacks
            continue
        path, count = f"{head}.{name}", counts[head, name]
        if name == "gate_up_proj":
            check_order_known(path, base, modules)
        if count == 1:
            if known is None:
                raise AdapterInvalidError(
                    f"{path}: all experts share these matrices, and how many there are depends on the base "
                    "model, which is not known here: name its directory (--base)"
                )
            count = known.experts
        for part, tensor in parts.items():
            if tensor.shape[0] not in (1, count) or 0 in tensor.shape:
                raise AdapterInvalidError(f"{path}.{part}: {count} experts cannot have {tensor.shape}")
            if len(found) + 2 * count > options.bounds.tensors:
                raise AdapterInvalidError(f"{path} is of {count} experts: no adapter has so many matrices")
            each = tensor.pieces()
            for number in range(count):
                one = each[number % len(each)]
                made = _named(head, number, name, part, one, known is not None and known.interleaved)
                if twice := found.keys() & made.keys():
                    raise AdapterInvalidError(f"{twice.pop()} and {path} mean the same expert")
                found |= made
    return _join_parts(settings, found, options)


def _named(
    head: str, number: int, name: str, part: str, matrix: RawTensor, in_turn: bool
) -> dict[str, RawTensor]:
    """A matrix of one expert by its name. Gate and up in one are two modules with the same A, unless their
    rows are `in_turn`."""
    if name != "gate_up_proj":
        return {f"{head}.{number}.{name}.{part}": matrix}
    if in_turn:
        return {f"{head}.gate_up_projs.{number}.{part}": matrix}
    halves, rows = [matrix, matrix], matrix.shape[0]
    if part == "lora_B.weight":
        if rows % 2:
            raise AdapterInvalidError(f"{head}.{name}: gate and up in one must have an even number of rows")
        halves = replace(matrix, shape=(2, rows // 2, *matrix.shape[1:])).pieces()
    keys = (f"{head}.{number}.{one}.{part}" for one in ("gate_proj", "up_proj"))
    return dict(zip(keys, halves, strict=True))


def _join_parts(
    settings: Mapping[str, Any], tensors: Mapping[str, RawTensor], options: ReadOptions
) -> tuple[Mapping[str, Any], dict[str, RawTensor]]:
    """Layers whose parts were trained apart: A has the ranks of all, B those of each in its own rows."""
    found: dict[str, RawTensor] = {}
    layers: dict[str, dict[str, RawTensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        if match := SPLIT.fullmatch(key):
            layers[match["path"]][f"{match['part']}.{match['side']}"] = tensor
        else:
            found[key] = tensor
    ranks, alphas = (dict(settings.get(name) or {}) for name in ("rank_pattern", "alpha_pattern"))
    for stem, parts in layers.items():
        whole, order = FUSED["q" if stem.endswith("_") else "gate_proj"]
        path = stem + whole
        keys = [f"{part}.lora_{side}.weight" for side in "AB" for part in order]
        if missing := [key for key in keys if key not in parts]:
            raise AdapterInvalidError(f"{path} is made of parts, and {stem}{missing[0]} is missing")
        read = [decode(stem + key, parts[key]) for key in keys]
        a, b = read[: len(order)], read[len(order) :]
        fits = all(m.ndim == 2 for m in read) and len({m.shape for m in a}) == 1
        if not fits or any(m.shape[1] != len(a[0]) for m in b):
            raise AdapterInvalidError(f"{path}: A and B of its parts must fit together, and be of one rank")
        module = names.module_of(path, options.modules)
        rank, rows = len(a[0]), sum(len(m) for m in b)
        joined = np.zeros((max(rows, module.out_dim if module else 0), rank * len(order)), np.float32)
        at = 0
        for number, matrix in enumerate(b):
            joined[at : at + len(matrix), number * rank : (number + 1) * rank] = matrix
            at += len(matrix)
        for side, values in (("A", np.concatenate(a)), ("B", joined)):
            found[f"{path}.lora_{side}.weight"] = RawTensor.of(values)
        name = path.removeprefix("base_model.model.")
        ranks[name], alphas[name] = rank * len(order), (settings.get("lora_alpha") or 0) * len(order)
    return {**settings, "rank_pattern": ranks, "alpha_pattern": alphas} if layers else settings, found
