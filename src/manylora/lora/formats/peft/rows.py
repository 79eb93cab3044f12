"""RowReader: the tensors of a PEFT directory to rows, one for each linear layer that the adapter changes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.kernels.loading import narrow
from manylora.kernels.row_format import RowFormat
from manylora.lora import staging
from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.layouts import THREADS, PlainRows
from manylora.lora.formats.peft.experts import (
    EXPERT_KEY,
    check_expert_shapes,
    check_scale,
    expert_rows,
)
from manylora.lora.formats.peft.module_tensors import (
    STACK_KEY,
    Parts,
    check_stacks,
    module_parts,
    stack_parts,
)
from manylora.lora.formats.peft.names import PEFT_KEY, in_our_order, in_peft_order
from manylora.lora.formats.peft.settings import PeftConfig
from manylora.lora.formats.peft.targets import check_pairs
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.safe_files import OpenFile
from manylora.lora.formats.tensor_files import RawTensor, check_type, decode, read_encoded
from manylora.lora.modules import EXPERT_IDS, LoraModuleId, not_enabled
from manylora.lora.number_types import BFLOAT16, NumberType
from manylora.lora.shared import SharedMatrices, share
from manylora.lora.tensors import AdapterRow, FileRows, check_dims, check_layer, digest_values

SPECIAL_MODULES = (*EXPERT_IDS, LoraModuleId.CROSS_ATTN_QKV)  # modules whose rows are not one pair each
IN_PLACE = {"F32": "float32", "BF16": "bfloat16"}  # types of such files


def find_plain(
    found: Mapping[tuple[int, int], Parts],
    options: ReadOptions,
    scale_of: Callable[[str, int, int], float],
) -> PlainRows | None:
    """The rows of a file that are plain: one pair of matrices each, in the order that the cache has.

    found: by layer and module id. scale_of: of B, by path, module id and rank. None: there is more to one
    of the rows, or they are of several types.
    """
    kinds = {tensor.dtype for parts in found.values() for *_, tensor in parts.values()}
    if len(kinds) != 1 or not kinds <= IN_PLACE.keys():
        return None
    rows, inputs, outputs, file = [], [], [], None
    for (layer, module_id), parts in sorted(found.items()):
        if set(parts) != {"A", "B"} or module_id in SPECIAL_MODULES:
            return None
        (path, _, a), (_, _, b) = parts["A"], parts["B"]
        if a.offset is None or b.offset is None or a.file is not b.file or file not in (None, a.file):
            return None
        order = np.arange(b.shape[0])
        turned = in_peft_order(path, module_id, order, options.module(module_id, layer))
        turned = in_our_order(path, module_id, turned, options.module(module_id, layer))
        if turned is not order and (np.diff(turned) != 1).any():
            return None
        file, rank = a.file, a.shape[0]
        rows.append((module_id, layer, rank, a.offset, b.offset, scale_of(path, module_id, rank)))
        inputs.append(a.shape[1])
        outputs.append(b.shape[0])
    if file is None:
        return None
    known = {rank: RowFormat(rank) for _, _, rank, *_ in rows}
    table = FileRows.of(file.name, IN_PLACE[kinds.pop()], rows)
    formats = tuple(known[rank] for rank in table.table["rank"].tolist())
    return PlainRows(table, np.array(inputs), np.array(outputs), formats)


# Elements of an adapter that several threads read, and of its rows: with smaller ones they wait for Python.
PARALLEL, PARALLEL_ROWS = 2**21, 2**16
NARROWED = 2**22  # elements of an adapter whose memory is worth the narrowing of each row
DORA_REASON = "DoRA magnitudes are divided by the row norms of the base model: name it with --base"


def row_scale(config: PeftConfig, path: str, module_id: int, rank: int) -> float:
    """What B of the layer at `path` is multiplied with."""
    return config.scale(_pattern_name(config, path, module_id), rank)


def _pattern_name(config: PeftConfig, path: str, module_id: int) -> str:
    """What patterns call the module at `path`: a router is a parameter to newer PEFT."""
    is_parameter = module_id == LoraModuleId.MOE_ROUTER and config.target_parameters
    return f"{path}.weight" if is_parameter else path


@dataclass
class RowReader:
    """Reads the rows of one adapter.

    base:         open; None: the adapter is read without it, which DoRA cannot be.
    encoded_type: an 8-bit type that all tensors have and that the rows keep; None: rows are in float32, or
                  in bfloat16 where the options say so and the adapter is large.
    vectors:      as of `LoraForm`.
    plain:        set by `rows` where all of them are plain: the file, and where they are in it.
    """

    config: PeftConfig
    options: ReadOptions
    base: BaseReader | None
    encoded_type: NumberType | None = None
    vectors: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    plain: tuple[OpenFile, PlainRows] | None = field(default=None, init=False)
    _shared: dict[object, SharedMatrices] = field(default_factory=dict, init=False)  # found so far

    def rows(self, tensors: Mapping[str, RawTensor], partial: list[str] | None = None) -> list[AdapterRow]:
        """Ascending by layer and module. All headers are judged before any number is read.

        tensors: no extras among them. partial: of `module_parts`. Raises AdapterInvalidError.
        """
        modules, bounds, encoded = self.options.modules, self.options.bounds, self.encoded_type
        experts = {key: tensor for key, tensor in tensors.items() if EXPERT_KEY.fullmatch(key)}
        stacks = {key: tensor for key, tensor in tensors.items() if STACK_KEY.fullmatch(key)}
        others = {key: tensor for key, tensor in tensors.items() if key not in experts and key not in stacks}
        check_stacks((key for key in others if PEFT_KEY.fullmatch(key)), modules)
        found = module_parts(others, partial, modules) | stack_parts(stacks, modules)
        limited = modules is not None and any(module.allowed for module in modules.values())
        for (_, module_id), parts in found.items():
            if modules is not None and limited and module_id not in modules:
                path = next(iter(parts.values()))[0]
                path = path.removeprefix("base_model.model.")
                raise AdapterInvalidError(f"{path}: {not_enabled(module_id, modules)}")
        check_pairs(tensors)
        elements = check_expert_shapes(experts, modules, bounds)
        for place, parts in found.items():
            elements += self._check_shapes(*place, parts)
        shared = {
            parts["A"][2].shape + parts["B"][2].shape for parts in found.values() if self._is_shared(parts)
        }
        elements += sum(a * b + c * d for a, b, c, d in shared)
        bounds.check_rows(len(found))
        bounds.check_elements(elements, float8=encoded is not None)
        if not experts and encoded is None and (made := self._read_plain(found)) is not None:
            return made
        read = decode if encoded is None else read_encoded
        decoded = {key: read(key, tensor) for key, tensor in experts.items()}
        rows = expert_rows(decoded, self.config, modules, encoded) + self._read_rows(found)
        return sorted(rows, key=lambda row: (row.layer, row.module_id))

    def _read_plain(self, found: Mapping[tuple[int, int], Parts]) -> list[AdapterRow] | None:
        """None: one of them is not plain, or is wrong, which whoever reads it next will tell."""
        if self.vectors or not self.options.digest:
            return None
        plain = find_plain(found, self.options, partial(row_scale, self.config))
        if plain is None or not plain.can_be_read:
            return None
        file = next(iter(found.values()))["A"][2].file
        assert file is not None
        rows = plain.read(file, self.options.bfloat16)
        if rows is not None:
            self.plain = file, plain
        return rows

    def _read_rows(self, found: Mapping[tuple[int, int], Parts]) -> list[AdapterRow]:
        """All payloads in one piece of memory; a large adapter's are read by several threads."""
        sizes = {place: self._size(parts) for place, parts in found.items()}
        total = sum(sizes.values())
        bfloat16 = self.options.bfloat16 and self.encoded_type is None and total >= NARROWED
        dtype = BFLOAT16 if bfloat16 else staging.FLOAT32
        whole = staging.take(total, dtype if self.encoded_type is None else np.dtype(np.uint8))
        pieces = np.split(whole, np.cumsum(list(sizes.values()))[:-1])
        places = dict(zip(found, pieces, strict=False))  # without rows there is one empty piece

        def read(part: list[tuple[int, int]]) -> list[AdapterRow]:
            made = []
            widest = max((sizes[place] for place in part), default=0)
            wide = np.empty(widest if bfloat16 else 0, np.float32)  # one row at a time
            for place in part:
                target = places[place]
                one = self._row(*place, found[place], wide[: target.size] if bfloat16 else target)
                if bfloat16:
                    narrow(target.view(np.uint16), one.payload)
                    one = replace(one, payload=target)
                made.append(one)
            return made

        order = sorted(found)
        few = total < max(PARALLEL, PARALLEL_ROWS * len(order))
        if few or any("magnitude" in parts or self._is_shared(parts) for parts in found.values()):
            return read(order)
        threads = min(THREADS, os.cpu_count() or 1)
        # A task costs more than some rows.
        shares = [order[first :: 4 * threads] for first in range(4 * threads)]
        with ThreadPoolExecutor(threads) as pool:
            return [one for rows in pool.map(read, shares) for one in rows]

    def _check_shapes(self, layer: int, module_id: int, parts: Parts) -> int:
        """The numbers of a row. Raises AdapterInvalidError for one that is not to be read."""
        (path, _, a), (_, _, b) = parts["A"], parts["B"]
        if self.options.modules and module_id in self.options.modules:
            check_layer(path, self.options.modules[module_id], layer)
        check_dims(path, a.shape, b.shape, self.options.module(module_id, layer))
        for _, key, tensor in parts.values():
            check_type(key, tensor)
        rank, dora = a.shape[0], "magnitude" in parts
        self.config.check_rank(_pattern_name(self.config, path, module_id), rank)
        self.options.bounds.check_rank(rank)
        if dora:
            size = math.prod(parts["magnitude"][2].shape)
            if size != b.shape[0]:
                raise AdapterInvalidError(f"{path} has {b.shape[0]} rows and a DoRA magnitude of {size}")
        elif self.config.use_dora:
            raise AdapterInvalidError(f"{path} is missing its DoRA magnitude")
        elements = self._size(parts)
        self.options.check_row(
            module_id, layer, RowFormat(rank, dora, shared=self._is_shared(parts)), elements
        )
        return elements

    def _vectors_of(self, parts: Parts) -> tuple[np.ndarray, np.ndarray] | None:
        return self.vectors.get(parts["A"][1]) if "A" in parts else None

    def _is_shared(self, parts: Parts) -> bool:
        return self._vectors_of(parts) is not None

    def _size(self, parts: Parts) -> int:
        """The numbers of a row's own."""
        if (vectors := self._vectors_of(parts)) is not None:
            return sum(one.size for one in vectors)
        return sum(math.prod(tensor.shape) for *_, tensor in parts.values())

    def _shared_row(self, layer: int, module_id: int, parts: Parts, payload: np.ndarray) -> AdapterRow:
        """As `_row`, of one that shares its matrices."""
        (path, key_a, a), (_, key_b, b) = parts["A"], parts["B"]
        module, vectors = self.options.module(module_id, layer), self._vectors_of(parts)
        assert vectors is not None
        order = np.arange(len(vectors[0]))
        for turned in (in_peft_order, in_our_order):
            order = turned(path, module_id, order, module)
        known = a.shape, b.shape, order.tobytes()
        if known not in self._shared:
            self._shared[known] = share(decode(key_a, a), decode(key_b, b)[order])
        np.concatenate((vectors[0][order], vectors[1]), out=payload)
        content = digest_values(payload) if self.options.digest else b""
        row = RowFormat(a.shape[0], shared=True)
        return AdapterRow(module_id, layer, row, payload, content, self._shared[known])

    def _row(self, layer: int, module_id: int, parts: Parts, payload: np.ndarray) -> AdapterRow:
        """payload: to be filled; float32, or bytes of `encoded_type`. parts: checked by `_check_shapes`."""
        if self._is_shared(parts):
            return self._shared_row(layer, module_id, parts, payload)
        (path, key_a, stored_a), (_, key_b, stored_b) = parts["A"], parts["B"]
        module, encoded = self.options.module(module_id, layer), self.encoded_type
        end = math.prod(stored_a.shape)
        a = payload[:end].reshape(stored_a.shape)
        b = payload[end : end + math.prod(stored_b.shape)].reshape(stored_b.shape)
        scale = row_scale(self.config, path, module_id, len(a))
        row = RowFormat(len(a), "magnitude" in parts)
        if encoded is not None:
            a[...], b[...] = read_encoded(key_a, stored_a), read_encoded(key_b, stored_b)
            check_scale(path, scale)
            row = replace(row, encoding=encoded.encoding, scale=float(np.float32(scale)))
        else:
            stored_a.fill(key_a, a)
            stored_b.fill(f"{key_b} (with its scaling)", b, scale)
        if (turned := in_peft_order(path, module_id, b, module)) is not b:
            b[...] = turned
        columns: list[np.ndarray] = [b]
        if row.dora:
            transposed = self.config.fan_in_fan_out if module is None else module.transposed
            magnitude = decode(*parts["magnitude"][1:]).reshape(-1)
            magnitude = in_peft_order(path, module_id, magnitude, module)
            if not self.config.dora_normalized:
                if self.base is None:
                    raise AdapterInvalidError(f"{path}: {DORA_REASON}")
                magnitude = magnitude / self.base.row_norms(path, a, b, transposed)
            columns.append(magnitude)
        columns = [in_our_order(path, module_id, column, module) for column in columns]
        if columns[0] is not b or len(columns) > 1:
            np.concatenate([column.ravel() for column in columns], out=payload[end:])
        payload = payload if encoded is None else payload.view(encoded.dtype)
        content = digest_values(payload) if self.options.digest else b""  # now, while it is in the cache
        return AdapterRow(module_id, layer, row, payload, content)
