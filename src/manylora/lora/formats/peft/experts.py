"""Routed experts in PEFT directories: matrices of each expert by its number, or of all experts in one pair.

PEFT writes the second form for `target_parameters`: A [experts * rank, in], the rows of one expert together,
and B [out, rank * experts], the columns of one rank together. `gate_up_proj` and `down_proj` of a layer are
two wrappers around the same module, told apart by their dimensions.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import RowFormat
from manylora.lora.bounds import Bounds
from manylora.lora.formats.peft.names import (
    DOWN,
    EXPERT_KEY,
    EXPERT_LISTS,
    EXPERT_NAMES,
    EXPERT_PARAMETERS,
    GATE,
    H_TO_4H,
    Modules,
)
from manylora.lora.formats.peft.settings import CONFIG, PeftConfig
from manylora.lora.formats.tensor_files import RawTensor, check_type
from manylora.lora.modules import MODULE_NAMES, LoraModule
from manylora.lora.number_types import NumberType
from manylora.lora.tensors import AdapterRow, check_dims

LARGEST_SCALE = 1e36  # times 448, a float32
IN_TURN = re.compile(r"gpt[-_]?oss", re.IGNORECASE)
"""In the name of a base whose stacked rows are those of gate and up in turn."""
Matrices = dict[str, np.ndarray]  # "A", "B"


def check_expert_shapes(tensors: Mapping[str, RawTensor], modules: Modules, bounds: Bounds) -> int:
    """The number of elements of all tensors. tensors: those whose names EXPERT_KEY matches. Raises
    AdapterInvalidError if one of them must not be read."""
    for key, tensor in tensors.items():
        match = EXPERT_KEY.fullmatch(key)
        assert match is not None
        if match["part"] is None:
            continue
        if len(tensor.shape) != 2:
            raise AdapterInvalidError(f"{key} must be a matrix, got {tensor.shape}")
        check_type(key, tensor)
        known = modules.get(DOWN) if modules else None
        if match["stacked"] is None or known is not None:
            experts = known.experts if match["stacked"] is not None and known is not None else 1
            bounds.check_rank(tensor.shape[match["part"] == "B"] // experts)
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def expert_rows(
    tensors: Mapping[str, np.ndarray], config: PeftConfig, modules: Modules, kind: NumberType | None = None
) -> list[AdapterRow]:
    """Rows in float32, with the scaling folded into B. tensors: those whose names EXPERT_KEY matches.

    kind: if the tensors are bytes of an encoded type, the rows keep them, with one scaling per row beside
    them.
    modules: the model's; the adapter must have the same experts and dimensions. Raises AdapterInvalidError.
    """
    single: dict[tuple[int, int], dict[int, tuple[str, Matrices]]] = defaultdict(dict)
    stacked: dict[int, dict[str, Matrices]] = defaultdict(dict)
    for key, values in sorted(tensors.items()):
        match = EXPERT_KEY.fullmatch(key)
        assert match is not None
        if match["part"] is None or config.use_dora:
            raise AdapterInvalidError(f"{key}: DoRA with MoE is not supported")
        layer, path = int(match["layer"]), match["path"]
        if match["stacked"] is None:
            _check_lists(path, match["list"] is not None, modules)
        if match["stacked"] is not None and modules is None and IN_TURN.search(config.base):
            raise AdapterInvalidError(
                f"{key}: in which order the rows of gate and up are depends on the base model, which is not "
                "known here: name its directory (--base)"
            )
        if match["stacked"] is not None:
            matrices = stacked[layer].setdefault(path, {})
        elif match["list"] is not None:
            experts = single[layer, EXPERT_LISTS[match["list"]]]
            matrices = experts.setdefault(int(match["number"]), (path, {}))[1]
        else:
            module_id = EXPERT_NAMES[match["name"]]
            module_id = H_TO_4H if module_id == GATE and _is_ungated(modules) else module_id
            experts = single[layer, module_id]
            matrices = experts.setdefault(int(match["expert"]), (path, {}))[1]
        if match["part"] in matrices:
            raise AdapterInvalidError(f"{key} names an expert's matrix a second time")
        matrices[match["part"]] = values
    rows = [
        row for place, experts in single.items() for row in _from_single(*place, experts, config, modules)
    ]
    for layer, wrappers in stacked.items():
        rows += _from_stacked(layer, wrappers, config, modules)
    if kind is None:
        return rows
    return [
        replace(row, format=replace(row.format, encoding=kind.encoding), payload=row.payload.view(kind.dtype))
        for row in rows
    ]


def _from_single(
    layer: int,
    module_id: int,
    experts: Mapping[int, tuple[str, Matrices]],
    config: PeftConfig,
    modules: Modules,
) -> list[AdapterRow]:
    module = modules.get(module_id) if modules else None
    where = f"{MODULE_NAMES[module_id]} of layer {layer}"
    count = max(experts) + 1
    _check_count(where, count, module)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for number in range(count):
        path, matrices = experts.get(number, (where, {}))
        a, b = _both(f"expert {number}: {path}", matrices)
        fused = ".gate_up_projs." in path
        for part in (b[::2], b[1::2]) if fused else (b,):
            check_dims(path, a.shape, part.shape, _of_one(modules, module_id))
        first = pairs[0] if pairs else (a, b)
        if (a.shape, b.shape) != (first[0].shape, first[1].shape):
            raise AdapterInvalidError(
                f"{where}: A and B of expert {number} are {a.shape} and {b.shape}, of expert 0 "
                f"{first[0].shape} and {first[1].shape}: all must be alike"
            )
        scale = config.scale(path, len(a))
        pairs.append((a, _scaled(path, b, scale)))
    a, b = (np.stack([pair[i] for pair in pairs]) for i in range(2))
    parts = {H_TO_4H: b[:, ::2], GATE: b[:, 1::2]} if fused else {module_id: b}
    return [_row(part_id, layer, a, part, scale) for part_id, part in parts.items()]


def _check_lists(path: str, in_lists: bool, modules: Modules) -> None:
    """Raises AdapterInvalidError if this model's experts have other names."""
    known = modules.get(DOWN) if modules else None
    if known is not None and known.interleaved != in_lists:
        raise AdapterInvalidError(
            f"{path}: this model's experts are not called so; the adapter is for another"
        )


def _from_stacked(
    layer: int, wrappers: Mapping[str, Matrices], config: PeftConfig, modules: Modules
) -> list[AdapterRow]:
    pairs = {path: _both(path, matrices) for path, matrices in wrappers.items()}
    rows: list[AdapterRow] = []
    down = _of_one(modules, DOWN)
    for name, (path, (a, b)) in _named(pairs, config, modules).items():
        turned = down is not None and down.transposed and (a.shape[1], len(b)) in _turned_sizes(down)
        own = "weight" if path.endswith(tuple(EXPERT_PARAMETERS)) else name
        parameter = f"{path.removesuffix('.base_layer')}.{own}"
        rank = config.rank(parameter)
        count, rest = divmod(len(a), rank)
        if rest or count == 0 or b.shape[1] != len(a):
            raise AdapterInvalidError(
                f"{path}: A {a.shape} and B {b.shape} do not hold experts of rank {rank}, as {CONFIG} says"
            )
        target = DOWN if name == "down_proj" else H_TO_4H
        module = modules.get(target) if modules else None
        _check_count(f"{path} with rank {rank}", count, module)
        a = a.reshape(count, rank, -1)
        scale = config.scale(parameter, rank)
        b = b.reshape(len(b), rank, count).transpose(2, 0, 1)
        if turned:
            a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        b = _scaled(path, b, scale)
        if name != "gate_up_proj":
            parts = {target: b}
        else:
            half, odd = divmod(b.shape[1], 2)
            if odd:
                raise AdapterInvalidError(f"{path}: the fused gate and up must have an even number of rows")
            if module is not None and module.interleaved:
                parts = {H_TO_4H: b[:, ::2], GATE: b[:, 1::2]}
            else:
                parts = {H_TO_4H: b[:, :half], GATE: b[:, half:]}
        for module_id, part in parts.items():
            check_dims(path, a[0].shape, part[0].shape, _of_one(modules, module_id))
            rows.append(_row(module_id, layer, *_without_idle_ranks(a, part), scale))
    return rows


def _named(
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], config: PeftConfig, modules: Modules
) -> dict[str, tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Finds which parameter each wrapper of a layer adapts. gate_up_proj goes from hidden to 2 * inner
    dimensions, down_proj from inner to hidden, so their sizes always differ."""
    sizes = {path: (a.shape[1], len(b)) for path, (a, b) in pairs.items()}
    down = _of_one(modules, DOWN)
    by_path = {EXPERT_PARAMETERS.get(path.rpartition(".")[2]): path for path in pairs}
    if None not in by_path:
        found: dict[str | None, str] = by_path
    elif down is not None:
        inner, hidden = down.in_dim, down.out_dim
        wanted = {(hidden, 2 * inner): "gate_up_proj", (inner, hidden): "down_proj"}
        if _is_ungated(modules):
            wanted = {(hidden, inner): "up_proj", (inner, hidden): "down_proj"}
        if down.transposed:
            wanted |= _turned_sizes(down)
        found = {wanted.get(size): path for path, size in sizes.items()}
    elif len(pairs) == 2:
        (one, (one_in, one_out)), (two, (two_in, two_out)) = sizes.items()
        if (one_in, one_out) == (two_out, 2 * two_in):
            found = {"gate_up_proj": one, "down_proj": two}
        elif (two_in, two_out) == (one_out, 2 * one_in):
            found = {"gate_up_proj": two, "down_proj": one}
        else:
            found = {None: one}
    else:
        names = {name.rpartition(".")[2] for name in config.target_parameters}
        known = names & {"gate_up_proj", "down_proj"}
        found = {known.pop() if len(known) == 1 else None: next(iter(pairs))}
    if None in found or len(found) < len(pairs):
        path = found.get(None, next(iter(pairs)))
        raise AdapterInvalidError(
            f"{path} goes from {sizes[path][0]} to {sizes[path][1]} dimensions: neither gate_up_proj nor "
            f"down_proj of {'this' if modules else 'any'} model's experts"
        )
    return {name: (path, pairs[path]) for name, path in found.items() if name}


def _is_ungated(modules: Modules) -> bool:
    """Whether up_proj is the only matrix into an expert."""
    up = modules.get(H_TO_4H) if modules else None
    return up is not None and not up.gated


def _turned_sizes(down: LoraModule) -> dict[tuple[int, int], str]:
    """PEFT treats a matrix [in, out] like one of [out, in], so that A and B have swapped dimensions. Its
    first versions did not do so. The dimensions show which version wrote an adapter."""
    inner, hidden = down.in_dim, down.out_dim
    return {(2 * inner, hidden): "gate_up_proj", (hidden, inner): "down_proj"}


def _without_idle_ranks(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A and B without the ranks that add nothing for any expert: if gate and up were adapted separately and
    then fused, half of the ranks are idle in each."""
    busy = b.any(axis=(0, 1))
    busy[0] |= not busy.any()
    return a[:, busy], b[:, :, busy]


def _both(where: str, matrices: Matrices) -> tuple[np.ndarray, np.ndarray]:
    for side in "AB":
        if side not in matrices:
            raise AdapterInvalidError(f"{where} is missing its lora_{side} matrix")
        if matrices[side].ndim != 2:
            raise AdapterInvalidError(f"{where}: lora_{side} must be a matrix, got {matrices[side].shape}")
    return matrices["A"], matrices["B"]


def _check_count(where: str, count: int, module: LoraModule | None) -> None:
    if module is not None and count != module.experts:
        raise AdapterInvalidError(f"{where} has {count} experts, this model has {module.experts}")


def _of_one(modules: Modules, module_id: int) -> LoraModule | None:
    """The module of a single expert; None: the model is not known or has no such module."""
    module = modules.get(module_id) if modules else None
    if module is None:
        return None
    count = module.experts
    return replace(module, in_dim=module.in_dim // count, out_dim=module.out_dim // count)


def check_scale(where: str, scale: float) -> None:
    """The scaling of a row in an encoded type. Raises AdapterInvalidError if it is beyond float32's range."""
    if not abs(scale) < LARGEST_SCALE:
        raise AdapterInvalidError(f"{where}: its scaling {scale:g} is beyond float32's range")


def _scaled(where: str, b: np.ndarray, scale: float) -> np.ndarray:
    if b.dtype == np.uint8:
        check_scale(where, scale)
        return b
    return b * np.float32(scale)


def _row(module_id: int, layer: int, a: np.ndarray, b: np.ndarray, scale: float) -> AdapterRow:
    payload, rank = np.concatenate((a.ravel(), b.ravel())), a.shape[1]
    beside = float(np.float32(scale)) if payload.dtype == np.uint8 else 1.0
    return AdapterRow(module_id, layer, RowFormat(rank, scale=beside), payload)
