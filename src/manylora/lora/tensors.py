"""Adapter: the canonical form of an adapter's tensors, checked, with a digest of their content."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from blake3 import blake3

from manylora.errors import AdapterInvalidError
from manylora.kernels.loading import all_finite
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.lora.bounds import Bounds
from manylora.lora.geometry import RowShape
from manylora.lora.modules import EXPERT_IDS, LoraModule, LoraModuleId, module_name
from manylora.lora.number_types import (
    BY_DTYPE,
    NUMBER_TYPES,
    is_bfloat16,
    to_bfloat16,
    widen_bfloat16,
)
from manylora.request import LoraExtra, LoraInput

FLOAT16_MAX = 65504.0
CHUNK = 2**22  # elements of an extra that are widened at one time
PARALLEL_BYTES = 2**23  # of an adapter that several threads digest
THREADS = 4


@dataclass(frozen=True, eq=False)
class AdapterRow:
    """One (layer, module): payload [elements] holds what the format says, flat and one part after another; of
    a routed-expert module A [experts, rank, in], B [experts, out, rank].

    content: `digest_values` of the payload, where the reader took it. It may have narrowed the payload since.
    """

    module_id: int
    layer: int
    format: RowFormat
    payload: np.ndarray
    content: bytes = b""


@dataclass(frozen=True, eq=False)
class Adapter:
    """Immutable; rows ascend by layer, then module, extras by name. Equal content has an equal digest,
    however it came."""

    digest: str
    rows: tuple[AdapterRow, ...]
    extras: tuple[LoraExtra, ...] = ()

    @property
    def num_elements(self) -> int:
        return sum(row.payload.size for row in self.rows) + sum(extra.values.size for extra in self.extras)

    @property
    def nbytes(self) -> int:
        return sum(row.payload.nbytes for row in self.rows) + sum(e.values.nbytes for e in self.extras)

    def shapes(self, modules: Mapping[int, LoraModule]) -> list[RowShape]:
        """Its rows as pages take them. modules: the model's."""
        return [RowShape(modules[row.module_id], row.layer, row.format) for row in self.rows]


def adapter_from_tensors(
    lora: LoraInput, modules: Mapping[int, LoraModule], num_layers: int, rank_limit: int, half: bool = False
) -> Adapter:
    """Check tensors as they came, and make them canonical. Payloads are views of the tensors, not copies.

    half: the compute dtype is float16, so values beyond its range are refused. Padding is not read, except
    where it is wider than any row needs: values there mean a larger model. 8-bit floats stay what they are,
    but for an adapter with DoRA, whose magnitudes they are too coarse for. Raises AdapterInvalidError, with
    TensorRT-LLM's texts where it has one.
    """
    weights, config = check_shapes(lora)
    Bounds.of(modules, num_layers, rank_limit).check_rows(len(config))
    scales = _check_scales(lora, weights, len(config))
    encoding = BY_DTYPE[weights.dtype].encoding
    if encoding is not Encoding.PLAIN and config.shape[1] == 4 and config[:, 3].any():
        _require(all(scale == 1 for scale in scales), "scales do not go with DoRA: fold them into B")
        weights, encoding = to_bfloat16("lora_weights", weights), Encoding.PLAIN
    rows = [
        _check_row(values, columns, encoding, scale, modules, num_layers, rank_limit)
        for values, columns, scale in zip(weights, config.tolist(), scales, strict=True)
    ]
    parts = (part for row in rows for part in separate_fused(row, modules))
    adapter = adapter_from_rows(parts, half, lora.extras)
    _check_surplus(weights, max((row.payload.size for row in rows), default=0))
    return adapter


def adapter_from_rows(
    rows: Iterable[AdapterRow],
    half: bool = False,
    extras: Iterable[LoraExtra] = (),
    finite: bool = False,
    digest: str | None = None,
) -> Adapter:
    """Check the values of rows and extras, and make them canonical. finite: those of rows were found to be.
    digest: theirs, where it is known. Raises AdapterInvalidError."""
    rows = sorted(rows, key=lambda row: (row.layer, row.module_id))
    for row, following in pairwise(rows):
        if (row.layer, row.module_id) == (following.layer, following.module_id):
            raise AdapterInvalidError(
                f"lora_config names module {module_name(row.module_id)} of layer {row.layer} more than once"
            )
    for row in rows:
        if half or not finite:
            _check_values(f"{module_name(row.module_id)} of layer {row.layer}", row.payload, half)
    extras = sorted(extras, key=lambda extra: extra.name)
    for extra in extras:
        for first in range(0, extra.values.size, CHUNK):
            _check_values(extra.name, extra.values.reshape(-1)[first : first + CHUNK], half)
    return Adapter(digest or _digest(rows, extras), tuple(rows), tuple(extras))


def pack_rows(rows: Iterable[AdapterRow]) -> tuple[np.ndarray, np.ndarray]:
    """Rows to the tensors of the wire: weights [1, rows, W] padded with zeros, config [1, rows, 4] int32."""
    rows = list(rows)
    width = max((row.payload.size for row in rows), default=0)
    weights = np.zeros((1, len(rows), width), dtype=rows[0].payload.dtype if rows else np.float32)
    for i, row in enumerate(rows):
        weights[0, i, : row.payload.size] = row.payload
    config = [(row.module_id, row.layer, row.format.rank, row.format.dora) for row in rows]
    return weights, np.array(config, np.int32).reshape(1, -1, 4)


def lora_input(task_id: int, rows: Iterable[AdapterRow], extras: Iterable[LoraExtra] = ()) -> LoraInput:
    """Rows and extras as a request in this process carries them. Rows are of one type."""
    rows = list(rows)
    scales = np.array([row.format.scale for row in rows], np.float32)
    scaled = bool((scales != 1).any())
    return LoraInput(task_id, *pack_rows(rows), extras=tuple(extras), scales=scales if scaled else None)


def check_dims(where: str, a: tuple[int, ...], b: tuple[int, ...], module: LoraModule | None) -> None:
    """Shapes: A must be [rank, in] and B [out, rank], none of them 0, and go between the dimensions of the
    model's module, if one is given. where: what they belong to. Raises AdapterInvalidError."""
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or 0 in (*a, *b):
        raise AdapterInvalidError(f"{where}: adapter size of A {a} mismatches adapter size of B {b}")
    if module is not None and (a[1], b[0]) != (module.in_dim, module.out_dim):
        raise AdapterInvalidError(
            f"{where} goes from {a[1]} to {b[0]} dimensions, {module.name} of this model from "
            f"{module.in_dim} to {module.out_dim}: the adapter was made for another model"
        )


def check_shapes(lora: LoraInput) -> tuple[np.ndarray, np.ndarray]:
    """Weights [rows, W] and config [rows, 3 or 4] of a request's tensors. Raises AdapterInvalidError."""
    weights, config = lora.weights, lora.config
    _require(lora.task_id is not None, "lora_task_id must be set for LoRA inference")
    if weights is None or config is None:
        raise AdapterInvalidError("Request for LoRA inference must have both lora_weights and lora_keys")
    _require(weights.ndim == 3, "Invalid shape for lora_weights tensor: expected [1, rows, width]")
    _require(config.ndim == 3, "Invalid shape for lora_keys tensor: expected [1, rows, 3 or 4]")
    _require(
        weights.shape[0] == config.shape[0] == 1, "Expected batch dimension to be 1 for each lora request"
    )
    _require(config.dtype == np.int32, f"Expected  lora keys to have TYPE_INT32 but was {config.dtype}")
    _require(
        weights.shape[1] == config.shape[1],
        "Expected dim1 lora_weights and lora_keys to have the same size, "
        f"got {weights.shape[1]} and {config.shape[1]}",
    )
    _require(
        config.shape[2] in (3, 4),
        f"Expected dim2 of lora_keys to have a size in [3, 4], got {config.shape[2]}",
    )
    _require(
        config.shape[1] > 0 or bool(lora.extras), "lora_config has no rows: an adapter needs at least one"
    )
    *others, last = (one.name for one in NUMBER_TYPES)
    _require(
        weights.dtype in BY_DTYPE,
        f"Expected lora weights to be the same data type as base model, or {', '.join(others)} or {last}, "
        f"but was {weights.dtype}",
    )
    return np.ascontiguousarray(weights[0]), config[0]


def _check_scales(lora: LoraInput, weights: np.ndarray, count: int) -> list[float]:
    """One for each of `count` rows."""
    if lora.scales is None:
        return [1.0] * count
    scales = np.asarray(lora.scales)
    right = scales.shape == (count,) and scales.dtype == np.float32 and bool(np.isfinite(scales).all())
    _require(right, f"scales must be {count} finite float32 numbers, one for each row of lora_weights")
    kinds = [one.name for one in NUMBER_TYPES if one.encoding is not Encoding.PLAIN]
    encoded = BY_DTYPE[weights.dtype].name in kinds
    _require(encoded, f"scales go with {' or '.join(kinds)} weights only: fold them into B")
    return [float(scale) for scale in scales]


def _check_row(
    weights: np.ndarray,
    config: Sequence[int],
    encoding: Encoding,
    scale: float,
    modules: Mapping[int, LoraModule],
    num_layers: int,
    limit: int,
) -> AdapterRow:
    """weights [W], config [3 or 4]: one row of a request's tensors."""
    module_id, layer, rank, dora = (*config, 0)[:4]
    _require(dora in (0, 1), f"lora_config's is_dora column must be 0 or 1, got {dora}")
    row = RowFormat(rank, bool(dora), encoding, scale)
    size = check_place(module_id, layer, row, len(weights), modules, num_layers, limit)
    return AdapterRow(module_id, layer, row, weights[:size])


def check_place(
    module_id: int,
    layer: int,
    row: RowFormat,
    elements: int,
    modules: Mapping[int, LoraModule],
    num_layers: int,
    limit: int,
) -> int:
    """The elements that a row needs; it has `elements`. Raises AdapterInvalidError."""
    _require(
        0 <= layer < num_layers,
        f"Expected layerId to be in the range [0, numModelLayers): got {layer}, the model has {num_layers}",
    )
    rank = row.rank
    _require(rank > 0, f"Expected adapterSize to be > 0, got {rank}")
    name = module_name(module_id)
    _require(module_id in modules, f"lora module {name} not enabled for this model")
    module = modules[module_id]
    _require(
        module.layers is None or layer in module.layers,
        f"lora module {name} does not exist in layer {layer} of this model",
    )
    experts = module_id in EXPERT_IDS
    _require(not (experts and row.dora), f"DoRA with MoE is not supported: {name} has is_dora 1")
    size = module.row_elements(row)
    _require(
        size <= elements,
        f"lora_weights has to few values for {name}: rank {rank} needs {size}, the row has {elements}",
    )
    _require(
        rank <= limit,
        f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank ({limit})",
    )
    return size


def separate_fused(row: AdapterRow, modules: Mapping[int, LoraModule]) -> Iterable[AdapterRow]:
    """Cross-attention's fused module as the three it fuses: they share A, but not what it is applied to."""
    if row.module_id != LoraModuleId.CROSS_ATTN_QKV:
        return [row]
    module = modules[LoraModuleId.CROSS_ATTN_QKV]
    a, b, magnitude = np.split(row.payload, np.cumsum(module.row_sizes(row.format)[:2]))
    ends = np.cumsum(module.parts)[:-1]
    parts = zip(np.split(b, ends * row.format.rank), np.split(magnitude, ends * row.format.dora), strict=True)
    return [
        AdapterRow(module_id, row.layer, row.format, np.concatenate((a, part, share)))
        for module_id, (part, share) in enumerate(parts, LoraModuleId.CROSS_ATTN_Q)
    ]


def _check_values(where: str, values: np.ndarray, half: bool) -> None:
    kind = BY_DTYPE.get(values.dtype)
    if kind is not None and kind.has_nan is not None:
        _require(not kind.has_nan(values), f"lora_weights holds a NaN in {where}")
        return
    values = widen_bfloat16(values) if is_bfloat16(values.dtype) else values
    _require(all_finite(values), f"lora_weights holds a NaN or an infinity in {where}")
    if half and values.dtype != np.float16:
        too_large = bool((np.abs(values) > FLOAT16_MAX).any())
        _require(not too_large, f"lora_weights holds a value beyond float16's range in {where}")


def _check_surplus(weights: np.ndarray, needed: int) -> None:
    if weights.dtype.kind == "V":
        weights = weights.view(f"u{weights.itemsize}")
    _require(
        not any(row[needed:].any() for row in weights),
        f"lora_weights has too many values: this model's rows need at most {needed}, and there are values "
        f"up to {weights.shape[1]}; the adapter was made for another model",
    )


def digest_values(values: np.ndarray) -> bytes:
    """BLAKE3 of their type and every byte, not of their shape; 32 bytes."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return blake3(type_name(values).encode() + b"\0").update(flat.view(np.uint8).data).digest()


def _digest(rows: list[AdapterRow], extras: list[LoraExtra]) -> str:
    """Over rows and extras in canonical order: what they are, their type, and every byte; no padding."""
    digest = blake3()
    for row, content in zip(rows, _contents(rows), strict=True):
        digest.update(repr((int(row.module_id), row.layer, *row.format.identity())).encode())
        digest.update(content)
    for extra in extras:
        digest.update(repr((extra.name, extra.values.shape, extra.token_ids)).encode())
        digest.update(digest_values(extra.values))
    return digest.hexdigest(20)


def _contents(rows: list[AdapterRow]) -> list[bytes]:
    if sum(0 if row.content else row.payload.nbytes for row in rows) < PARALLEL_BYTES:
        return [row.content or digest_values(row.payload) for row in rows]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda row: row.content or digest_values(row.payload), rows))


def type_name(values: np.ndarray) -> str:
    """What an adapter's values are, whatever NumPy calls it."""
    kind = BY_DTYPE.get(values.dtype)
    return kind.name if kind is not None else values.dtype.name


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise AdapterInvalidError(text)
