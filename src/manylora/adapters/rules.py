"""AdapterRules: what a model can serve. has_effect: whether an adapter changes anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from manylora.adapters.bounds import Bounds
from manylora.adapters.extras import check_extras
from manylora.adapters.modules import LoraModule, LoraModuleId, module_name, not_enabled
from manylora.adapters.number_types import BY_DTYPE, NUMBER_TYPES, to_bfloat16
from manylora.adapters.tensors import Adapter, AdapterRow, adapter_from_rows
from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.request import INVOCATION, LoraExtra, LoraInput

NOTHING = (
    "it changes nothing, so it answers as the base model does: what it adds is zero (an untrained adapter?)"
)
NEUTRAL = (".bias", ".turn", ".scale", ".input_scale", ".input_turn")
LEAST = 1e-5  # relative magnitude below which a product is only rounding


def has_effect(
    rows: Sequence[AdapterRow], extras: Sequence[LoraExtra], modules: Mapping[int, LoraModule]
) -> bool:
    """rows: checked rows of these modules. Biases of zeros and scales of ones have no effect."""
    if any(not extra.name.endswith(NEUTRAL) or _differs(extra) for extra in extras):
        return True
    random = np.random.default_rng(0)
    for row in rows:
        module, rank = modules[row.module_id].at(row.layer), row.format.rank
        parts = np.split(row.payload, np.cumsum(module.row_sizes(row.format)))
        a, b, magnitude = (_wide(part) for part in parts[:3])
        if row.format.dora and np.abs(magnitude - 1).max() > LEAST:
            return True
        if row.shared is not None:
            of_b, of_d = np.split(magnitude, [module.out_dim])
            a, b = _wide(row.shared.a), _wide(row.shared.b) * of_b[:, None] * of_d
        a, b = a.reshape(module.experts, rank, -1), b.reshape(module.experts, -1, rank)
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow counts as an effect
            inner = a @ random.standard_normal((a.shape[2], 1), np.float32)
            given, most = np.abs(b @ inner), np.abs(b) @ np.abs(inner)
            if not (given <= LEAST * most.max(initial=0)).all():
                return True
    return False


def _differs(extra: LoraExtra) -> bool:
    values = extra.values if extra.values.dtype.kind == "f" else _wide(extra.values)
    if extra.name.endswith(".input_turn"):
        size = values.shape[1]
        return bool(np.any(values.reshape(-1, size, size) != np.eye(size)))
    return bool(np.any(values != extra.name.endswith("scale")))


def _wide(values: np.ndarray) -> np.ndarray:
    kind = BY_DTYPE.get(values.dtype)
    return kind.widen(values) if kind is not None and kind.widen else values.astype(np.float32, copy=False)


@dataclass(frozen=True)
class AdapterRules:
    """modules: those that adapters may have, by id. rank_limit: the largest rank of a row. half: the model
    computes in float16, so values beyond its range are refused. All methods raise AdapterInvalidError, with
    TensorRT-LLM's texts where it has one."""

    modules: Mapping[int, LoraModule]
    num_layers: int
    rank_limit: int
    half: bool = False

    def check(self, lora: LoraInput) -> Adapter:
        """Validate tensors from a request and make them canonical. Payloads are views of them, not copies.

        Padding is not read, except where it is wider than any row needs: values there mean a larger model.
        8-bit floats are kept, except with DoRA, for whose magnitudes they are too coarse.
        """
        self._check_extras(lora.extras)
        weights, config = check_shapes(lora)
        Bounds.of(self.modules, self.num_layers, self.rank_limit).check_rows(len(config))
        scales = _check_scales(lora, weights, len(config))
        encoding = BY_DTYPE[weights.dtype].encoding
        if encoding is not Encoding.PLAIN and config.shape[1] == 4 and config[:, 3].any():
            _require(all(scale == 1 for scale in scales), "scales do not go with DoRA: fold them into B")
            weights, encoding = to_bfloat16("lora_weights", weights), Encoding.PLAIN
        rows = []
        for values, columns, scale in zip(weights, config.tolist(), scales, strict=True):
            module_id, layer, rank, dora = (*columns, 0)[:4]
            _require(dora in (0, 1), f"lora_config's is_dora column must be 0 or 1, got {dora}")
            row = RowFormat(rank, bool(dora), encoding, scale)
            size = self.check_row(module_id, layer, row, len(values))
            rows.append(AdapterRow(module_id, layer, row, values[:size]))
        adapter = self._with_effect(adapter_from_rows(self._separate(rows), self.half, lora.extras))
        needed = max((row.payload.size for row in rows), default=0)
        bits = weights.view(f"u{weights.itemsize}") if weights.dtype.kind == "V" else weights
        _require(
            not any(row[needed:].any() for row in bits),
            f"lora_weights has too many values: this model's rows need at most {needed}, and there are "
            f"values up to {weights.shape[1]}; the adapter was made for another model",
        )
        return adapter

    def check_rows(
        self, rows: Iterable[AdapterRow], extras: Iterable[LoraExtra], digest: str | None = None
    ) -> Adapter:
        """Make rows canonical whose values a reader has checked. digest: of all rows, if known."""
        rows, extras = list(rows), list(extras)
        self._check_extras(extras)
        if not (rows or extras):
            raise AdapterInvalidError("the adapter has no rows: it needs at least one")
        for row in rows:
            self.check_row(row.module_id, row.layer, row.format, row.payload.size)
        made = adapter_from_rows(self._separate(rows), self.half, extras, finite=True, digest=digest)
        return made if digest else self._with_effect(made)

    def _with_effect(self, adapter: Adapter) -> Adapter:
        return replace(adapter, acts=has_effect(adapter.rows, adapter.extras, self.modules))

    def check_row(self, module_id: int, layer: int, row: RowFormat, elements: int) -> int:
        """The number of elements that a row needs. elements: the number that it has."""
        _require(
            0 <= layer < self.num_layers,
            f"Expected layerId to be in the range [0, numModelLayers): got {layer}, "
            f"the model has {self.num_layers}",
        )
        rank = row.rank
        _require(rank > 0, f"Expected adapterSize to be > 0, got {rank}")
        name = module_name(module_id)
        _require(module_id in self.modules, not_enabled(module_id, self.modules))
        module = self.modules[module_id]
        _require(
            module.is_on(layer),
            f"lora module {name} does not exist in layer {layer} of this model",
        )
        size = module.at(layer).row_elements(row)
        _require(
            size <= elements,
            f"lora_weights has to few values for {name}: rank {rank} needs {size}, the row has {elements}",
        )
        limit = self.rank_limit
        _require(
            rank <= limit, f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank ({limit})"
        )
        return size

    def _check_extras(self, extras: Iterable[LoraExtra]) -> None:
        check_extras(extras, self.num_layers)
        reads = any(module.encoder_layers for module in self.modules.values())
        activated = any(extra.name == INVOCATION for extra in extras)
        _require(
            not (reads and activated), "activated LoRA is for models that are a decoder alone, as in PEFT"
        )

    def _separate(self, rows: Iterable[AdapterRow]) -> Iterable[AdapterRow]:
        """Split cross-attention's fused module into its three, which share A but have different inputs."""
        for row in rows:
            if row.module_id != LoraModuleId.CROSS_ATTN_QKV:
                yield row
                continue
            module = self.modules[LoraModuleId.CROSS_ATTN_QKV]
            a, b, magnitude = np.split(row.payload, np.cumsum(module.row_sizes(row.format)[:2]))
            ends = np.cumsum(module.parts)[:-1]
            parts = np.split(b, ends * row.format.rank), np.split(magnitude, ends * row.format.dora)
            for module_id, part in enumerate(zip(*parts, strict=True), LoraModuleId.CROSS_ATTN_Q):
                yield AdapterRow(module_id, row.layer, row.format, np.concatenate((a, *part)))


def check_shapes(lora: LoraInput) -> tuple[np.ndarray, np.ndarray]:
    """Weights [rows, W] and config [rows, 3 or 4] of a request's tensors. Raises AdapterInvalidError."""
    weights, config = lora.weights, lora.config
    _require(lora.task_id is not None, "lora_task_id must be set for LoRA inference")
    if weights is None:
        raise AdapterInvalidError("Request for LoRA inference must have both lora_weights and lora_keys")
    if config is None:
        raise AdapterInvalidError("Request for LoRA inference with lora weights must also have lora config")
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
    if lora.scales is None:
        return [1.0] * count
    scales = np.asarray(lora.scales)
    right = scales.shape == (count,) and scales.dtype == np.float32 and bool(np.isfinite(scales).all())
    _require(right, f"scales must be {count} finite float32 numbers, one for each row of lora_weights")
    kinds = [one.name for one in NUMBER_TYPES if one.encoding is not Encoding.PLAIN]
    encoded = BY_DTYPE[weights.dtype].name in kinds
    _require(encoded, f"scales go with {' or '.join(kinds)} weights only: fold them into B")
    return [float(scale) for scale in scales]


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise AdapterInvalidError(text)
