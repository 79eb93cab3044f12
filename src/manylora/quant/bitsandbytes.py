"""Checkpoints of bitsandbytes: NF4 and FP4, with scales that may themselves be quantised, and int8."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from manylora.errors import ConfigError
from manylora.kernels.quantised import QuantisedWeight

STATE = "weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
STATE_BYTES = 2**16
NESTED_ABSMAX, NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"


def four_bits(tensors: Mapping[str, Tensor], columns: int) -> QuantisedWeight:
    """weight: uint8, two codes per byte, the first in the high half, row after row. weight.absmax: the
    largest magnitude of each `blocksize` values; uint8 if quantised, in blocks with their own scales and an
    offset. weight.quant_map: float32 [16], the value of each code. Raises ConfigError.
    """
    state = _state(tensors)
    rows, inputs = state["shape"]
    if inputs != columns or columns % 2:
        raise ConfigError(f"weight must have {columns} inputs by config.json, an even number, got {inputs}")
    _check("weight", tensors["weight"].flatten(), torch.uint8, rows * columns // 2)
    _check("weight.quant_map", tensors["weight.quant_map"], torch.float32, 16)
    size, absmax = state["blocksize"], tensors["weight.absmax"]
    if absmax.dtype == torch.uint8:
        absmax = _nested(tensors, state)
    _check("weight.absmax", absmax, torch.float32, -(-rows * columns // size))
    group = math.gcd(columns, size)  # a block may end within a row
    blocks = torch.arange(0, rows * columns, group, device=absmax.device) // size
    codes = tensors["weight"].reshape(rows, columns // 2)
    values = (codes >> 4) | ((codes & 15) << 4)
    scales = absmax[blocks].view(rows, columns // group)
    return QuantisedWeight(values, scales, codebook=tensors["weight.quant_map"])


def eight_bits(tensors: Mapping[str, Tensor], columns: int) -> QuantisedWeight:
    """weight: int8 [N, K], in units of 1/127 of the row's largest magnitude, which is SCB, float32 [N].
    Raises ConfigError.
    """
    weight, largest = tensors["weight"], tensors["SCB"]
    rows = len(weight)
    if weight.dtype != torch.int8 or tuple(weight.shape) != (rows, columns):
        raise ConfigError(
            f"weight must be int8 [outputs, {columns}], got {tuple(weight.shape)} {weight.dtype}"
        )
    _check("SCB", largest, torch.float32, rows)
    if "weight_format" in tensors and int(tensors["weight_format"]) != 0:
        raise ConfigError("weight_format must be 0, rows: other layouts are not read")
    return QuantisedWeight(weight, largest.view(rows, 1) / 127)


def _nested(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    codes, table = tensors["weight.absmax"].flatten(), tensors.get(NESTED_MAP)
    scales, size = tensors.get(NESTED_ABSMAX), state["nested_blocksize"]
    if table is None or scales is None:
        raise ConfigError(f"weight.absmax is quantised, but {NESTED_MAP} or {NESTED_ABSMAX} is not there")
    _check(NESTED_MAP, table, torch.float32, 256)
    _check(NESTED_ABSMAX, scales, torch.float32, -(-len(codes) // size))
    of_code = scales[torch.arange(len(codes), device=codes.device) // size]
    return table[codes.int()] * of_code + state["nested_offset"]


def _state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The JSON stored beside a weight."""
    name = next(name for name in tensors if name.startswith(STATE))
    stored = tensors[name]
    if stored.dtype != torch.uint8 or stored.numel() > STATE_BYTES:
        raise ConfigError(f"{name} must be JSON in uint8, of at most {STATE_BYTES} bytes")
    try:
        raw = json.loads(bytes(stored.flatten().tolist()))
        shape = [int(size) for size in raw["shape"]]
        found: dict[str, Any] = {
            "shape": shape,
            "blocksize": int(raw["blocksize"]),
            "nested_blocksize": int(raw.get("nested_blocksize") or 1),
            "nested_offset": torch.tensor(float(raw.get("nested_offset") or 0.0)),
        }
        if len(shape) != 2 or min(*shape, found["blocksize"], found["nested_blocksize"]) < 1:
            raise ValueError("shape must be two sizes, and sizes of blocks at least 1")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name} is not what bitsandbytes writes: {error}") from error
    found["nested_offset"] = found["nested_offset"].to(stored.device)
    return found


def _check(name: str, tensor: Tensor, dtype: torch.dtype, size: int) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != (size,):
        raise ConfigError(f"{name} must be {(size,)} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
