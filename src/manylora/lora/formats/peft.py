"""PEFT directories: adapter_config.json and adapter_model.safetensors (or, if asked for, .bin).

Strict: an adapter of which a part would be lost, or that means more than B A x, is refused with the reason.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.kernels.loading import narrow
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.lora import staging
from manylora.lora.bounds import ANY_MODEL, Bounds
from manylora.lora.file_adapter import FileRows
from manylora.lora.formats import one_line
from manylora.lora.formats.base_weights import BaseReader, BaseWeights
from manylora.lora.formats.opened import is_plain, read_small
from manylora.lora.formats.peft_config import CONFIG, PeftConfig, read_peft_config
from manylora.lora.formats.peft_experts import (
    EXPERT_KEY,
    check_expert_shapes,
    check_scale,
    expert_rows,
)
from manylora.lora.formats.peft_extras import check_extra_shapes, is_extra, read_extras
from manylora.lora.formats.peft_names import ATTENTION_IDS, MLP_IDS, PEFT_KEY, in_our_order, in_peft_order
from manylora.lora.formats.peft_stacks import STACK_KEY, check_stacks, stack_parts
from manylora.lora.formats.tensor_files import (
    RawTensor,
    check_type,
    decode,
    read_encoded,
    read_safetensors,
    read_torch,
)
from manylora.lora.modules import EXPERT_IDS, LoraModule, LoraModuleId
from manylora.lora.number_types import BFLOAT16, BY_SAFETENSORS, NumberType
from manylora.lora.tensors import AdapterRow, check_dims, check_place, digest_values
from manylora.request import LoraExtra

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
# Elements of an adapter that several threads read, and of its rows: with smaller ones they wait for Python.
PARALLEL, PARALLEL_ROWS = 2**21, 2**16
NARROWED = 2**22  # elements of an adapter whose memory is worth the narrowing of each row
THREADS = 4
SPECIAL_MODULES = (*EXPERT_IDS, LoraModuleId.CROSS_ATTN_QKV)  # modules whose rows are not one pair each
IN_PLACE = {"F32": "float32", "BF16": "bfloat16"}  # types that `stored_rows` is for
DORA = re.compile(r"lora_magnitude_vector|weight_m_wdecomp")
DORA_REASON = (
    "DoRA magnitudes must be divided by the base's row norms before they are served; normalise the adapter "
    "and send its tensors with is_dora 1"
)
NO_ROW = (
    "biases, norms, embedding and head have no place in the tensors of an adapter; serve its PEFT directory "
    "itself, or train without them"
)
REFUSED = (
    (re.compile(r"wpe.*\.lora_"), "adapters on the position embedding are not supported"),
    (DORA, "this DoRA magnitude belongs to no known LoRA module"),
    (
        re.compile(r"^(?!.*\.lora_)"),
        "full weights and biases of this module are not supported: of modules_to_save the embedding, the "
        "head and norms are",
    ),
)

# "A", "B", "magnitude" -> path of the module, key, values
Parts = dict[str, tuple[str, str, RawTensor]]


def has_peft(folder: Path) -> bool:
    return is_plain(folder / CONFIG)


def read_peft(
    folder: Path,
    partial: list[str] | None = None,
    modules: Mapping[int, LoraModule] | None = None,
    *,
    base: BaseWeights | None = None,
    allow_bin: bool = False,
    bounds: Bounds = ANY_MODEL,
) -> list[AdapterRow]:
    """Rows in float32, the scaling folded into B; ascending by layer and module.

    The scaling is `PeftConfig.scale` of the matrix's own rank. partial: a list that takes a line for each
    part left out; None refuses such adapters. modules: the model's, whose dimensions the matrices must then
    have. base: what DoRA magnitudes are normalised with; None refuses DoRA that is not normalised yet.
    bounds: judged by the header, before a value is read. Raises AdapterInvalidError, for extras too.
    """
    config, tensors, extras = _open(folder, base, allow_bin, bounds)
    for key in sorted(extras):
        if partial is None or DORA.search(key):
            raise AdapterInvalidError(f"{key}: {NO_ROW}")
        partial.append(f"no match {key}: {NO_ROW}")
    rows = _rows(tensors, config, partial, modules, base, bounds)
    if not rows:
        raise AdapterInvalidError("the adapter holds no LoRA matrices")
    return rows


def read_peft_whole(
    folder: Path,
    modules: Mapping[int, LoraModule] | None = None,
    *,
    base: BaseWeights | None = None,
    allow_bin: bool = False,
    digest: bool = False,
    bfloat16: bool = False,
    float8: bool = False,
    bounds: Bounds = ANY_MODEL,
) -> tuple[list[AdapterRow], list[LoraExtra]]:
    """As `read_peft`, with what has no row; base: needed for that too, since it is relative to the base.

    digest: take that of each row as it is read, where the adapter's will be wanted. bfloat16: narrow rows
    then, for pages of that type, where they are large; those of routed experts stay as they are. float8: an
    adapter whose matrices all are F8_E4M3 keeps them so, with the scaling beside each row; with DoRA it does
    not. Extras are in float32.
    """
    config, tensors, found = _open(folder, base, allow_bin, bounds)
    check_extra_shapes(found, bounds)
    kind = _find_encoding(tensors, config) if float8 else None
    rows = _rows(tensors, config, None, modules, base, bounds, digest, bfloat16 and kind is None, kind)
    with base.open() if base is not None else nullcontext() as reader:
        extras = read_extras(found, tensors, config, modules, reader)
    if not rows and not extras:
        raise AdapterInvalidError("the adapter holds no LoRA matrices")
    return rows, extras


def stored_rows(
    folder: Path, modules: Mapping[int, LoraModule] | None = None, bounds: Bounds = ANY_MODEL
) -> FileRows | None:
    """Where the values are that `read_peft_whole` gives of an adapter that it has read before. None: there is
    more to them than two matrices for each row, and the scaling. Raises AdapterInvalidError."""
    config, tensors = read_peft_config(folder, bounds), peft_tensors(folder, bounds=bounds)
    kinds = {tensor.dtype for tensor in tensors.values()}
    special = any(is_extra(key) or EXPERT_KEY.fullmatch(key) or STACK_KEY.fullmatch(key) for key in tensors)
    if special or config.use_dora or len(kinds) != 1 or not kinds <= IN_PLACE.keys():
        return None
    rows = []
    for (layer, module_id), parts in _gather(tensors, None).items():
        if set(parts) != {"A", "B"} or module_id in SPECIAL_MODULES:
            return None
        (path, _, a), (_, _, b) = parts["A"], parts["B"]
        order = np.arange(b.shape[0])
        for turned in (in_peft_order, in_our_order):
            order = turned(path, module_id, order, modules.get(module_id) if modules else None)
        if a.offset is None or b.offset is None or (np.diff(order) != 1).any():
            return None
        rows.append((module_id, layer, a.shape[0], a.offset, b.offset, _scale(config, path, module_id, a)))
    return FileRows.of(WEIGHTS, IN_PLACE[kinds.pop()], rows)


def peft_tensors(folder: Path, allow_bin: bool = False, bounds: Bounds = ANY_MODEL) -> dict[str, RawTensor]:
    """Key to tensor, as stored. Raises AdapterInvalidError."""
    path, pickled = folder / WEIGHTS, folder / PICKLED
    if is_plain(path):
        return read_safetensors(path, bounds)
    if is_plain(pickled) and allow_bin:
        try:
            data = read_small(pickled, bounds, bounds.checkpoint_bytes)
            return read_torch(data, pickled.name, bounds)
        except OSError as error:
            raise AdapterInvalidError(f"{PICKLED} is not readable: {one_line(error)}") from error
    hint = f": {PICKLED} is a pickle and is not read, save as safetensors" if is_plain(pickled) else ""
    raise AdapterInvalidError(f"{WEIGHTS} is missing{hint}")


def _open(
    folder: Path, base: BaseWeights | None, allow_bin: bool, bounds: Bounds
) -> tuple[PeftConfig, dict[str, RawTensor], dict[str, RawTensor]]:
    """Configuration, the tensors of rows, and those of extras."""
    config = read_peft_config(folder, bounds)
    if config.use_dora and base is None and not config.dora_normalized:
        raise AdapterInvalidError(f"{CONFIG} sets use_dora: {DORA_REASON}")
    tensors = peft_tensors(folder, allow_bin, bounds)
    extras = {key: tensors.pop(key) for key in list(tensors) if is_extra(key)}
    return config, tensors, extras


def _rows(
    tensors: Mapping[str, RawTensor],
    config: PeftConfig,
    partial: list[str] | None,
    modules: Mapping[int, LoraModule] | None,
    base: BaseWeights | None,
    bounds: Bounds,
    digest: bool = False,
    bfloat16: bool = False,
    kind: NumberType | None = None,
) -> list[AdapterRow]:
    """kind: the type with an encoding that all tensors have, and rows keep."""
    experts = {key: tensor for key, tensor in tensors.items() if EXPERT_KEY.fullmatch(key)}
    stacks = {key: tensor for key, tensor in tensors.items() if STACK_KEY.fullmatch(key)}
    plain = {key: tensor for key, tensor in tensors.items() if key not in experts and key not in stacks}
    check_stacks((key for key in plain if PEFT_KEY.fullmatch(key)), modules)
    found = _gather(plain, partial) | stack_parts(stacks, modules)
    elements = check_expert_shapes(experts, modules, bounds)
    for place, parts in found.items():
        elements += _check_shapes(*place, parts, config, modules, bounds)
    bounds.check_rows(len(found))
    bounds.check_elements(elements, float8=kind is not None)
    read = decode if kind is None else read_encoded
    rows = expert_rows({key: read(key, tensor) for key, tensor in experts.items()}, config, modules, kind)
    with base.open() if base is not None else nullcontext() as reader:
        rows += _read_rows(found, config, modules, reader, digest, bfloat16, kind)
    return sorted(rows, key=lambda row: (row.layer, row.module_id))


def _find_encoding(tensors: Mapping[str, RawTensor], config: PeftConfig) -> NumberType | None:
    """The type with an encoding that all tensors have. None, too, with DoRA, and where a row may have more
    than one scaling: those of its experts may differ."""
    if config.use_dora or (config.alpha_pattern and any(EXPERT_KEY.fullmatch(key) for key in tensors)):
        return None
    kinds = {tensor.dtype for tensor in tensors.values()}
    kind = BY_SAFETENSORS.get(kinds.pop()) if len(kinds) == 1 else None
    if kind is None or kind.encoding is Encoding.PLAIN or any(DORA.search(key) for key in tensors):
        return None
    return kind


def _gather(tensors: Mapping[str, RawTensor], partial: list[str] | None) -> dict[tuple[int, int], Parts]:
    found: dict[tuple[int, int], Parts] = {}
    roots: dict[str, str] = {}
    for key, tensor in sorted(tensors.items()):
        match = PEFT_KEY.fullmatch(key)
        ids = MLP_IDS if match and match["mlp"] else ATTENTION_IDS
        if match is None or match["name"] not in ids:
            _leave_out(key, partial)
            continue
        roots.setdefault(match["root"], key)
        parts = found.setdefault((int(match["layer"]), ids[match["name"]]), {})
        part = match["side"] or "magnitude"
        if part in parts:
            raise AdapterInvalidError(f"{key} and {parts[part][0]} mean the same module")
        parts[part] = (match["path"], key, tensor)
    if len(roots) > 1:
        raise AdapterInvalidError(f"{' and '.join(roots.values())} belong to two models")
    return found


def _leave_out(key: str, partial: list[str] | None) -> None:
    reason = next((text for pattern, text in REFUSED if pattern.search(key)), "no such LoRA module is known")
    # A module without its magnitude would be another adapter, so this may not be left out.
    if partial is None or DORA.search(key):
        raise AdapterInvalidError(f"{key}: {reason}")
    partial.append(f"no match {key}: {reason}")


def _read_rows(
    found: Mapping[tuple[int, int], Parts],
    config: PeftConfig,
    modules: Mapping[int, LoraModule] | None,
    base: BaseReader | None,
    digest: bool,
    bfloat16: bool,
    kind: NumberType | None,
) -> list[AdapterRow]:
    """All payloads in one piece of memory; a large adapter's are read by several threads."""
    sizes = {place: sum(math.prod(t.shape) for *_, t in parts.values()) for place, parts in found.items()}
    total = sum(sizes.values())
    bfloat16 = bfloat16 and total >= NARROWED
    dtype = BFLOAT16 if bfloat16 else staging.FLOAT32
    whole = staging.take(total, dtype if kind is None else np.dtype(np.uint8))
    pieces = np.split(whole, np.cumsum(list(sizes.values()))[:-1])
    places = dict(zip(found, pieces, strict=False))  # without rows there is one empty piece

    def read(part: list[tuple[int, int]]) -> list[AdapterRow]:
        made = []
        widest = max((sizes[place] for place in part), default=0)
        wide = np.empty(widest if bfloat16 else 0, np.float32)  # one row at a time
        for place in part:
            target = places[place]
            payload = wide[: target.size] if bfloat16 else target
            one = _row(*place, found[place], config, modules, base, payload, digest, kind)
            if bfloat16:
                narrow(target.view(np.uint16), payload)
                one = replace(one, payload=target)
            made.append(one)
        return made

    order = sorted(found)
    few = total < max(PARALLEL, PARALLEL_ROWS * len(order))
    if few or any("magnitude" in parts for parts in found.values()):
        return read(order)
    threads = min(THREADS, os.cpu_count() or 1)
    parts = [order[first :: 4 * threads] for first in range(4 * threads)]  # a task costs more than some rows
    with ThreadPoolExecutor(threads) as pool:
        return [one for rows in pool.map(read, parts) for one in rows]


def _check_shapes(
    layer: int,
    module_id: int,
    parts: Parts,
    config: PeftConfig,
    modules: Mapping[int, LoraModule] | None,
    bounds: Bounds,
) -> int:
    """The numbers of a row. Raises AdapterInvalidError for one that is not to be read."""
    missing = sorted({"A", "B"} - parts.keys())
    if missing:
        present = next(iter(parts.values()))[0]
        raise AdapterInvalidError(f"{present} is missing its lora_{missing[0]} matrix")
    (path, _, a), (_, _, b) = parts["A"], parts["B"]
    check_dims(path, a.shape, b.shape, modules.get(module_id) if modules else None)
    for _, key, tensor in parts.values():
        check_type(key, tensor)
    rank, dora = a.shape[0], "magnitude" in parts
    bounds.check_rank(rank)
    if dora:
        size = math.prod(parts["magnitude"][2].shape)
        if size != b.shape[0]:
            raise AdapterInvalidError(f"{path} has {b.shape[0]} rows and a DoRA magnitude of {size}")
    elif config.use_dora:
        raise AdapterInvalidError(f"{path} is missing its DoRA magnitude")
    elements = sum(math.prod(tensor.shape) for *_, tensor in parts.values())
    if modules is not None and bounds.num_layers is not None:
        row = RowFormat(rank, dora)
        check_place(module_id, layer, row, elements, modules, bounds.num_layers, bounds.rank)
    return elements


def _row(
    layer: int,
    module_id: int,
    parts: Parts,
    config: PeftConfig,
    modules: Mapping[int, LoraModule] | None,
    base: BaseReader | None,
    payload: np.ndarray,
    digest: bool,
    kind: NumberType | None,
) -> AdapterRow:
    """payload: to be filled; float32, or bytes of `kind`. parts: as `_check_shapes` wants them."""
    (path, key_a, stored_a), (_, key_b, stored_b) = parts["A"], parts["B"]
    module = modules.get(module_id) if modules else None
    end = math.prod(stored_a.shape)
    a = payload[:end].reshape(stored_a.shape)
    b = payload[end : end + math.prod(stored_b.shape)].reshape(stored_b.shape)
    scale = _scale(config, path, module_id, stored_a)
    if kind is not None:
        a[...], b[...] = read_encoded(key_a, stored_a), read_encoded(key_b, stored_b)
        check_scale(path, scale)
        b[...] = in_peft_order(path, module_id, b, module)
        payload[end:] = in_our_order(path, module_id, b, module).ravel()
        row = RowFormat(a.shape[0], encoding=kind.encoding, scale=float(np.float32(scale)))
        payload = payload.view(kind.dtype)
        return AdapterRow(module_id, layer, row, payload, digest_values(payload) if digest else b"")
    stored_a.fill(key_a, a)
    stored_b.fill(f"{key_b} (with its scaling)", b, scale)
    if (turned := in_peft_order(path, module_id, b, module)) is not b:
        b[...] = turned
    columns: list[np.ndarray] = [b]
    if "magnitude" in parts:
        transposed = config.fan_in_fan_out if module is None else module.transposed
        magnitude = decode(*parts["magnitude"][1:])
        magnitude = in_peft_order(path, module_id, magnitude.reshape(-1), module)
        columns.append(_magnitude(path, magnitude, a, b, config, base, transposed))
    columns = [in_our_order(path, module_id, column, module) for column in columns]
    if columns[0] is not b or len(columns) > 1:
        np.concatenate([column.ravel() for column in columns], out=payload[end:])
    content = digest_values(payload) if digest else b""  # now, while it is in the cache
    return AdapterRow(module_id, layer, RowFormat(a.shape[0], "magnitude" in parts), payload, content)


def _scale(config: PeftConfig, path: str, module_id: int, a: RawTensor) -> float:
    # A router is a parameter to newer PEFT, and called so in patterns.
    named = f"{path}.weight" if module_id == LoraModuleId.MOE_ROUTER and config.target_parameters else path
    return config.scale(named, a.shape[0])


def _magnitude(
    path: str,
    magnitude: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    config: PeftConfig,
    base: BaseReader | None,
    transposed: bool,
) -> np.ndarray:
    """Normalised, [out]; b has the scaling in it. transposed: the base's matrix is stored [in, out]."""
    magnitude = magnitude.reshape(-1)
    if config.dora_normalized:
        return magnitude
    if base is None:
        raise AdapterInvalidError(f"{path}: {DORA_REASON}")
    return magnitude / base.row_norms(path, a, b, transposed)
