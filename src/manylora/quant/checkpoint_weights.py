"""CheckpointWeights: finds and reads the quantised weights of a checkpoint, which consist of several tensors.

Here are also those of bitsandbytes: NF4 and FP4, with scales that may themselves be quantised, and int8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from manylora.errors import ConfigError
from manylora.kernels.quantised import QuantisedWeight
from manylora.quant import layouts
from manylora.quant.checkpoint import CheckpointQuant
from manylora.quant.layouts import mxfp4

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


PARTS = {"values": "qweight", **{name: name for name in ("scales", "offsets", "zeros", "order", "codebook")}}
"""Fields of a QuantisedWeight -> suffixes of tensor names in a directory of `manylora build`."""

# For each method: required and optional suffixes of a quantised weight's tensors.
TENSORS: dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {
    "built": ((("qweight", "scales"), ("offsets", "zeros", "order", "codebook")),),
    "awq": ((("qweight", "qzeros", "scales"), ()),),
    "gptq": ((("qweight", "qzeros", "scales"), ("g_idx",)),),
    "compressed-tensors": (
        (("weight_packed", "weight_scale"), ("weight_zero_point", "weight_g_idx", "weight_shape")),
        (("weight", "weight_scale"), ("weight_zero_point",)),
    ),
    "fp8": ((("weight", "weight_scale_inv"), ()), (("weight", "weight_scale"), ())),
    "mxfp4": ((("_blocks", "_scales"), ()),),  # for the experts of a layer
    "bitsandbytes": (
        *(
            (
                ("weight", "weight.absmax", "weight.quant_map", f"{STATE}{kind}"),
                (NESTED_ABSMAX, NESTED_MAP),
            )
            for kind in KINDS
        ),
        (("weight", "SCB"), ("weight_format",)),
    ),
    "fbgemm_fp8": ((("weight", "weight_scale"), ("input_scale_ub",)),),
}
# Suffixes that plain layers do not have.
KEYS = {
    "qweight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "_blocks",
    "_scales",
    "weight.absmax",
    "SCB",
}
UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale")


class CheckpointWeights:
    """quant: from the checkpoint's config.json; None: plain weights, or a directory of `manylora build`.
    names: of all tensors in the checkpoint.
    """

    def __init__(self, quant: CheckpointQuant | None, names: Collection[str]) -> None:
        self._quant, self._names = quant, names
        self._method = "built" if quant is None else quant.method

    def parts(self, source: str) -> dict[str, str]:
        """Suffix -> name of the tensors of the quantised weight `source`. Empty if it is a plain weight or
        missing. Raises ConfigError if only some of them exist.
        """
        if not source.endswith("weight") and self._method != "mxfp4":
            return {}
        stem, layouts_known = source.removesuffix("weight"), TENSORS[self._method]
        for needed, others in layouts_known:
            if all(stem + end in self._names for end in needed):
                found = [*needed, *(end for end in others if stem + end in self._names)]
                return {end: stem + end for end in found}
        for needed, _ in layouts_known:
            if any(stem + end in self._names for end in KEYS.intersection(needed)):
                missing = next(stem + end for end in needed if stem + end not in self._names)
                raise ConfigError(f"the checkpoint lacks {missing}, which other tensors of the layer need")
        return {}

    def names(self, source: str) -> set[str]:
        """Names of the tensors of the weight `source`, quantised or plain."""
        return set(self.parts(source).values()) or {source}

    def is_left_out(self, name: str) -> bool:
        """Whether a tensor is not loaded: scales of activations, keys and values, which are not quantised
        here, and spare biases.
        """
        return self._quant is not None and (name.endswith(UNUSED) or self.is_spare_bias(name))

    def is_spare_bias(self, name: str) -> bool:
        """Some GPTQ tools write a bias for every layer. If the model has none, it must be zero."""
        return self._method == "gptq" and name.endswith(".bias") and f"{name[:-4]}qweight" in self._names

    def read(self, source: str, columns: int, read: Callable[[str], Tensor]) -> QuantisedWeight:
        """The weight `source`, which has `parts`, or that of one expert. read: returns a tensor by name.
        Raises ConfigError that names the layer and the tensor that does not fit.
        """
        tensors = {end: read(name) for end, name in self.parts(source).items()}
        try:
            return self._layout(tensors, columns)
        except ConfigError as error:
            raise ConfigError(f"{source.removesuffix('.weight')}: {error}") from error

    def _layout(self, tensors: dict[str, Tensor], columns: int) -> QuantisedWeight:
        if self._quant is None:
            return layouts.built(tensors, columns)
        if self._method == "awq":
            return layouts.awq(tensors, columns)
        if self._method == "gptq":
            return layouts.gptq(tensors, columns, self._quant.zero_shift)
        if self._method == "mxfp4":
            return mxfp4(tensors["_blocks"], tensors["_scales"], columns)
        if self._method == "bitsandbytes":
            return (eight_bits if "SCB" in tensors else four_bits)(tensors, columns)
        if "weight_packed" in tensors:
            return layouts.packed(tensors, columns)
        return layouts.scaled(tensors, columns, self._quant.block)
