"""RowPlan: which tensors of an adapter become rows. They are checked by their headers before values are
read. If rows are stored in the file as they are served, they have a `FileLayout`, and compiled code reads,
scales, checks and digests them. Other rows are read with NumPy."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from blake3 import blake3

from manylora.adapters import staging
from manylora.adapters.formats.base_weights import BaseReader
from manylora.adapters.formats.peft import names
from manylora.adapters.formats.peft.experts import (
    ExpertReader,
    check_expert_shapes,
    check_scale,
    normalised_magnitude,
)
from manylora.adapters.formats.peft.settings import PeftConfig
from manylora.adapters.formats.read_options import FileLayout, ReadOptions
from manylora.adapters.formats.safe_files import OpenFile
from manylora.adapters.formats.tensor_files import RawTensor, check_type, decode, read_encoded
from manylora.adapters.modules import EXPERT_IDS, LoraModuleId, not_enabled
from manylora.adapters.number_types import BFLOAT16, NumberType
from manylora.adapters.tensors import (
    AdapterRow,
    FileRows,
    SharedMatrices,
    check_dims,
    check_layer,
    digest_values,
    share,
)
from manylora.errors import AdapterInvalidError
from manylora.kernels.loading import FILE_ROW, can_take, narrow, take_rows
from manylora.kernels.row_format import RowFormat

SPECIAL_MODULES = (*EXPERT_IDS, LoraModuleId.CROSS_ATTN_QKV)  # modules whose rows are not one pair each
LAYOUT_TYPES = {"F32": "float32", "BF16": "bfloat16"}  # of files that have a layout
THREADS = 4
# Elements of an adapter that several threads read, and of its rows: with smaller ones they wait for Python.
PARALLEL, PARALLEL_ROWS = 2**21, 2**16
NARROWED = 2**22  # elements of an adapter whose memory is worth the narrowing of each row
Place = tuple[int, int]  # layer and module id
Vectors = Mapping[str, tuple[np.ndarray, np.ndarray]]


def plan_rows(
    tensors: Mapping[str, RawTensor],
    config: PeftConfig,
    options: ReadOptions,
    encoded_type: NumberType | None = None,
    vectors: Vectors | None = None,
) -> RowPlan:
    """tensors: of a PEFT directory, without extras. vectors: as in `LoraForm`. Raises AdapterInvalidError."""
    experts = {key: tensor for key, tensor in tensors.items() if names.EXPERT_KEY.fullmatch(key)}
    others = {key: tensor for key, tensor in tensors.items() if key not in experts}
    modules, known = names.tensors_by_module(others, options.partial, options.modules), options.modules or {}
    if any(module.allowed for module in known.values()):
        for (_, module_id), parts in modules.items():
            if module_id not in known:
                path = parts.path.removeprefix("base_model.model.")
                raise AdapterInvalidError(f"{path}: {not_enabled(module_id, known)}")
    # If a tensor has a wrong name, the module that lacks it and the one that it names are told.
    sides: dict[str, str] = {}
    for match in filter(None, map(names.SIDE.fullmatch, sorted(tensors))):
        sides[match["path"]] = sides.get(match["path"], "") + match["side"]
    missing = {"A": "lora_B", "B": "lora_A"}
    lines = [f"{path} is missing its {missing[one]} matrix" for path, one in sides.items() if one != "AB"]
    if lines:
        raise AdapterInvalidError(", and ".join(lines[:2]))
    for parts in modules.values():
        if "A" not in parts.keys:  # only a magnitude
            raise AdapterInvalidError(f"{parts.path} is missing its lora_A matrix")
        parts.vectors = vectors.get(parts.keys["A"]) if vectors else None
    return RowPlan(modules, config, options, encoded_type, experts)


class RowPlan:
    """The tensors of each row, checked by their headers and sorted by layer and module.

    layout, file: where the rows are in the adapter's file, if they are stored there as they are served.
    """

    def __init__(
        self,
        modules: Mapping[Place, names.ModuleTensors],
        config: PeftConfig,
        options: ReadOptions,
        encoded_type: NumberType | None = None,
        experts: Mapping[str, RawTensor] | None = None,
    ) -> None:
        """modules: with A and B. encoded_type: the 8-bit type of all tensors, which rows keep; None: they are
        float32, or bfloat16 if the options ask for it and the adapter is large."""
        self.config, self.options, self.encoded_type = config, options, encoded_type
        self.layout: FileLayout | None = None
        self.file: OpenFile | None = None
        self._shared: dict[object, SharedMatrices] = {}
        self.modules, self.experts = dict(sorted(modules.items())), experts or {}
        elements, shared = 0, set()
        if self.experts:
            elements = check_expert_shapes(self.experts, options.modules or {}, options.bounds)
        for place, parts in modules.items():
            self._check_module(*place, parts)
            elements += parts.size
            if parts.vectors is not None:
                shared.add(parts.tensors["A"].shape + parts.tensors["B"].shape)
        elements += sum(a * b + c * d for a, b, c, d in shared)
        options.bounds.check_rows(len(modules))
        options.bounds.check_elements(elements, float8=encoded_type is not None)
        if not self.experts and not shared:
            self._find_layout()

    def read(self, base: BaseReader | None) -> list[AdapterRow]:
        """Rows sorted by layer and module, with digests if the options ask for them. base: an open base
        model; None: not known, so DoRA is refused. Raises AdapterInvalidError."""
        if self.layout is not None and self.file is not None and self.options.digest:
            taken = read_layout(self.layout, self.file, self.options.bfloat16)
            if taken is not None:  # else one of its numbers is wrong: reading them singly tells which
                return taken
        rows: list[AdapterRow] = []
        if self.experts:
            read = decode if self.encoded_type is None else read_encoded
            decoded = {key: read(key, tensor) for key, tensor in self.experts.items()}
            reader = ExpertReader(self.config, self.options.modules or {}, self.encoded_type)
            rows += reader.rows(decoded, base)
        rows += self._read_modules(base)
        return sorted(rows, key=lambda row: (row.layer, row.module_id))

    def _check_module(self, layer: int, module_id: int, parts: names.ModuleTensors) -> None:
        path, options = parts.path, self.options
        a, b = parts.tensors["A"].shape, parts.tensors["B"].shape
        if options.modules and module_id in options.modules:
            check_layer(path, options.modules[module_id], layer)
        check_dims(path, a, b, options.module(module_id, layer))
        for part, tensor in parts.tensors.items():
            check_type(parts.keys[part], tensor)
        rank, dora = a[0], "magnitude" in parts.tensors
        self.config.check_rank(self._setting_name(path, module_id), rank)
        options.bounds.check_rank(rank)
        if dora:
            size = math.prod(parts.tensors["magnitude"].shape)
            if size != b[0]:
                raise AdapterInvalidError(f"{path} has {b[0]} rows and a DoRA magnitude of {size}")
        elif self.config.use_dora:
            raise AdapterInvalidError(f"{path} is missing its DoRA magnitude")
        row = RowFormat(rank, dora, shared=parts.vectors is not None)
        options.check_row(module_id, layer, row, parts.size)

    def _setting_name(self, path: str, module_id: int) -> str:
        """The name of the module at `path` in settings: newer PEFT treats a router as a parameter."""
        is_parameter = module_id == LoraModuleId.MOE_ROUTER and self.config.target_parameters
        return f"{path}.weight" if is_parameter else path

    def _find_layout(self) -> None:
        """Set `layout` if each row is one pair of matrices in the same file, in the cache's row order, and
        all have the same type."""
        kinds = {tensor.dtype for parts in self.modules.values() for tensor in parts.tensors.values()}
        if len(kinds) != 1 or not kinds <= LAYOUT_TYPES.keys():
            return
        rows, inputs, outputs, file = [], [], [], None
        for (layer, module_id), parts in self.modules.items():
            a, b = parts.tensors["A"], parts.tensors["B"]
            if len(parts.tensors) > 2 or module_id in SPECIAL_MODULES:
                return
            if a.file is None or a.file is not b.file or file not in (None, a.file):
                return
            if (np.diff(self._order(layer, module_id, parts.path, b.shape[0])) != 1).any():
                return
            file, rank = a.file, a.shape[0]
            scale = self.config.scale(self._setting_name(parts.path, module_id), rank)
            rows.append((module_id, layer, rank, a.offset, b.offset, scale))
            inputs.append(a.shape[1])
            outputs.append(b.shape[0])
        if file is None:
            return
        known = {rank: RowFormat(rank) for _, _, rank, *_ in rows}
        stored = FileRows.of(file.name, LAYOUT_TYPES[kinds.pop()], rows)
        formats = tuple(known[rank] for rank in stored.table["rank"].tolist())
        self.layout, self.file = FileLayout(stored, np.array(inputs), np.array(outputs), formats), file

    def _order(self, layer: int, module_id: int, path: str, count: int) -> np.ndarray:
        """In the file, the numbers of B's rows in our order."""
        order, module = np.arange(count), self.options.module(module_id, layer)
        order = names.in_peft_order(path, module_id, order, module)
        return names.in_our_order(path, module_id, order, module)

    def _read_modules(self, base: BaseReader | None) -> list[AdapterRow]:
        """All payloads are in one piece of memory. Several threads read a large adapter."""
        sizes = [parts.size for parts in self.modules.values()]
        total, order = sum(sizes), list(self.modules)
        bfloat16 = self.options.bfloat16 and self.encoded_type is None and total >= NARROWED
        dtype = BFLOAT16 if bfloat16 else staging.FLOAT32
        whole = staging.take(total, dtype if self.encoded_type is None else np.dtype(np.uint8))
        ends = np.cumsum(sizes)
        targets = dict(zip(order, np.split(whole, ends[:-1]), strict=False))  # without rows one empty piece

        def read(places: list[Place]) -> list[AdapterRow]:
            rows = []
            widest = max((targets[place].size for place in places), default=0)
            wide = np.empty(widest if bfloat16 else 0, np.float32)  # one row at a time
            for place in places:
                target = targets[place]
                row = self._read_row(*place, wide[: target.size] if bfloat16 else target, base)
                if bfloat16:
                    narrow(target.view(np.uint16), row.payload)
                    row = replace(row, payload=target)
                rows.append(row)
            return rows

        alone = any(parts.vectors or "magnitude" in parts.tensors for parts in self.modules.values())
        if alone or total < max(PARALLEL, PARALLEL_ROWS * len(order)):
            return read(order)
        threads = min(THREADS, os.cpu_count() or 1)
        # A task costs more than some rows.
        shares = [order[first :: 4 * threads] for first in range(4 * threads)]
        with ThreadPoolExecutor(threads) as pool:
            return [row for rows in pool.map(read, shares) for row in rows]

    def _read_row(
        self, layer: int, module_id: int, payload: np.ndarray, base: BaseReader | None
    ) -> AdapterRow:
        """payload: receives the values; float32, or bytes of `encoded_type`. B is multiplied by its scaling,
        except in an encoded type."""
        parts, module = self.modules[layer, module_id], self.options.module(module_id, layer)
        path, encoded, shared = parts.path, self.encoded_type, None
        stored_a, stored_b = parts.tensors["A"], parts.tensors["B"]
        row = RowFormat(stored_a.shape[0], "magnitude" in parts.tensors)
        if parts.vectors is not None:
            order = self._order(layer, module_id, path, len(parts.vectors[0]))
            np.concatenate((parts.vectors[0][order], parts.vectors[1]), out=payload)
            row, shared = replace(row, shared=True), self._share(parts, order)
        else:
            scale = self.config.scale(self._setting_name(path, module_id), row.rank)
            end = math.prod(stored_a.shape)
            a = payload[:end].reshape(stored_a.shape)
            b = payload[end : end + math.prod(stored_b.shape)].reshape(stored_b.shape)
            if encoded is not None:
                a[...], b[...] = (read_encoded(parts.keys[side], parts.tensors[side]) for side in "AB")
                check_scale(path, scale)
                row = replace(row, encoding=encoded.encoding, scale=float(np.float32(scale)))
            else:
                stored_a.fill(parts.keys["A"], a)
                stored_b.fill(f"{parts.keys['B']} (with its scaling)", b, scale)
            if (turned := names.in_peft_order(path, module_id, b, module)) is not b:
                b[...] = turned
            columns: list[np.ndarray] = [b]
            if row.dora:
                transposed = self.config.fan_in_fan_out if module is None else module.transposed
                magnitude = decode(parts.keys["magnitude"], parts.tensors["magnitude"]).reshape(-1)
                magnitude = names.in_peft_order(path, module_id, magnitude, module)
                normal = normalised_magnitude(path, magnitude, a, b, self.config, base, transposed)
                columns += [] if normal is None else [normal]
            columns = [names.in_our_order(path, module_id, column, module) for column in columns]
            if columns[0] is not b or len(columns) > 1:
                np.concatenate([column.ravel() for column in columns], out=payload[a.size :])
            payload = payload if encoded is None else payload.view(encoded.dtype)
        content = digest_values(payload) if self.options.digest else b""  # now, while it is in the cache
        return AdapterRow(module_id, layer, row, payload, content, shared)

    def _share(self, parts: names.ModuleTensors, order: np.ndarray) -> SharedMatrices:
        """A, and B with its rows in this order: in memory once for all rows that have the same matrices."""
        a, b = parts.tensors["A"], parts.tensors["B"]
        known = a.shape, b.shape, order.tobytes()
        if known not in self._shared:
            self._shared[known] = share(decode(parts.keys["A"], a), decode(parts.keys["B"], b)[order])
        return self._shared[known]


def read_layout(layout: FileLayout, file: OpenFile, bfloat16: bool) -> list[AdapterRow] | None:
    """Read rows with this layout by compiled code, with digests, in float32 or bfloat16. None: a value is not
    finite, the file is too short, or there is no compiled code."""
    if not can_take(layout.rows.dtype):
        return None
    stored = layout.rows.table
    sizes = stored["rank"] * (layout.inputs + layout.outputs)
    ends = np.cumsum(sizes)
    whole = staging.take(int(ends[-1]), BFLOAT16 if bfloat16 else staging.FLOAT32)
    rows = np.empty(len(stored), FILE_ROW)
    for name in ("a", "b", "rank", "scale"):
        rows[name] = stored[name]
    rows["in"], rows["out"] = layout.inputs, layout.outputs
    rows["target"] = whole.ctypes.data + whole.itemsize * (ends - sizes)
    target = "bfloat16" if bfloat16 else "float32"
    threads = min(THREADS, os.cpu_count() or 1)
    digests = take_rows(
        file.descriptor, rows, target, layout.rows.dtype, threads, lambda content: blake3(content).digest()
    )
    if digests is None:
        return None
    places = zip(stored["module_id"].tolist(), stored["layer"].tolist(), strict=True)
    found = zip(places, layout.formats, np.split(whole, ends[:-1]), digests, strict=True)
    return [AdapterRow(*place, row, piece, digest) for place, row, piece, digest in found]
