"""CheckpointWeights: finds the quantised weights of a checkpoint, several tensors each, and reads each layout
into a QuantisedWeight, without rounding.

Arguments: `tensors` of a linear layer by the suffixes of their names; `columns`: K, the layer's inputs. All
functions raise ConfigError that names a tensor that does not fit. Scales keep the checkpoint's dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from manylora.checkpoints.quant.config import CheckpointQuant
from manylora.errors import ConfigError
from manylora.kernels.quantised import BLOCK, FLOAT4, QuantisedWeight

FLOAT8 = torch.float8_e4m3fn
WHOLE = (torch.int8, FLOAT8)  # one value per byte
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in an AWQ word of each of its eight values."""
STATE = "weight.quant_state.bitsandbytes__"
BITSANDBYTES_KINDS = ("nf4", "fp4")
STATE_BYTES = 2**16
NESTED_ABSMAX, NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
MIDDLE = {4: 8, 8: 128}  # bits -> the unsigned value that represents zero


def built(tensors: Mapping[str, Tensor], columns: int) -> QuantisedWeight:
    """The format of `manylora build`: the fields of a QuantisedWeight."""
    values, scales = tensors["qweight"], tensors["scales"]
    _check("qweight", values, (len(scales), columns // 2 if values.dtype == torch.uint8 else columns))
    rest = {name: tensors.get(name) for name in ("offsets", "zeros", "order", "codebook")}
    return QuantisedWeight(values, scales, **rest)  # type: ignore[arg-type]


def awq(tensors: Mapping[str, Tensor], columns: int) -> QuantisedWeight:
    """qweight [K, N / 8], qzeros [G, N / 8] int32, scales [G, N]."""
    scales = tensors["scales"]
    groups, rows = scales.shape
    _check("qweight", tensors["qweight"], (columns, rows // 8))
    _check("qzeros", tensors["qzeros"], (groups, rows // 8))
    halves = unpack(tensors["qweight"], 4, AWQ_ORDER).T
    zeros = unpack(tensors["qzeros"], 4, AWQ_ORDER).T
    return _with_table(halves_to_bytes(halves), scales.T, _signed(zeros, 4), *regroup(_even(columns, groups)))


def gptq(tensors: Mapping[str, Tensor], columns: int, zero_shift: int) -> QuantisedWeight:
    """qweight [K * bits / 32, N], qzeros [G, N * bits / 32] int32, scales [G, N], g_idx [K] or none.

    A zero point is the stored one plus zero_shift, modulo its bits: -1 is stored as the largest value.
    """
    scales, words = tensors["scales"], tensors["qweight"]
    groups, rows = scales.shape
    bits = 8 if len(words) * 4 == columns else 4
    _check("qweight", words, (columns * bits // 32, rows))
    _check("qzeros", tensors["qzeros"], (groups, rows * bits // 32))
    stored = unpack(tensors["qzeros"], bits).int() + zero_shift
    zeros = _signed((stored & (2**bits - 1)).to(torch.uint8).T, bits)
    of_input = tensors["g_idx"] if "g_idx" in tensors else _even(columns, groups)
    return _from_words(words.T.contiguous(), bits, scales.T, zeros, of_input, columns)


def packed(tensors: Mapping[str, Tensor], columns: int) -> QuantisedWeight:
    """compressed-tensors: weight_packed [N, K * bits / 32] int32, weight_scale [N, G], and optionally
    weight_zero_point [N * bits / 32, G] int32 and weight_g_idx [K].
    """
    words, scales = tensors["weight_packed"], _table("weight_scale", tensors["weight_scale"])
    rows, groups = len(words), scales.shape[1]
    bits = 8 if words.shape[1] * 4 == columns else 4
    _check("weight_packed", words, (rows, columns * bits // 32))
    scales = scales.expand(rows, groups)
    zeros = None
    if "weight_zero_point" in tensors:
        points = tensors["weight_zero_point"]
        _check("weight_zero_point", points, (-(-rows * bits // 32), groups))
        zeros = _signed(unpack(points.T.contiguous(), bits)[:, :rows].T, bits)
    of_input = tensors.get("weight_g_idx")
    if of_input is None or bool((of_input < 0).all()):  # all -1: activation ordering was off
        of_input = _even(columns, groups)
    return _from_words(words, bits, scales, zeros, of_input, columns)


def scaled(tensors: Mapping[str, Tensor], columns: int, block: tuple[int, int] | None) -> QuantisedWeight:
    """weight [N, K] in float8_e4m3fn or int8, with factors weight_scale or weight_scale_inv: one, [N, 1], [N,
    G], or one per block of outputs and inputs.
    """
    weight = tensors["weight"]
    if weight.dtype not in WHOLE or weight.dim() != 2 or weight.shape[1] != columns:
        raise ConfigError(
            f"weight must be float8_e4m3fn or int8 [outputs, {columns}], got {_described(weight)}"
        )
    name = "weight_scale" if "weight_scale" in tensors else "weight_scale_inv"
    scales, rows = _table(name, tensors[name]), len(weight)
    if block and tuple(scales.shape) == (-(-rows // block[0]), -(-columns // block[1])):
        scales = scales.repeat_interleave(block[0], 0)[:rows]
        of_input = torch.arange(columns) // block[1]
    elif scales.shape[0] in (1, rows):
        scales = scales.expand(rows, -1)
        of_input = _even(columns, scales.shape[1])
    else:
        raise ConfigError(f"{name} must have a row for each of {rows} outputs, got {_described(scales)}")
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = _table("weight_zero_point", zeros).to(torch.int8).expand(rows, -1)
    return _with_table(weight, scales, zeros, *regroup(of_input))


def mxfp4(blocks: Tensor, scales: Tensor, columns: int) -> QuantisedWeight:
    """A weight [N, K] in 4 bits: half of each scale times twice the values, without rounding.

    blocks: uint8 [N, K / 32, 16], an even input in the low half of a byte. scales: uint8 [N, K / 32], the
    exponent plus 127. Raises ConfigError.
    """
    rows, groups = len(scales), columns // BLOCK
    for name, tensor, wanted in (
        ("_blocks", blocks, (rows, groups, BLOCK // 2)),
        ("_scales", scales, (rows, groups)),
    ):
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != wanted or columns % BLOCK:
            raise ConfigError(f"{name} must be uint8 {wanted} by config.json, got {_described(tensor)}")
    halved = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 128)
    codebook = torch.tensor(FLOAT4, dtype=torch.float32, device=blocks.device)
    return QuantisedWeight(blocks.reshape(rows, -1), halved, codebook=codebook)


def bitsandbytes(tensors: Mapping[str, Tensor], columns: int) -> QuantisedWeight:
    """NF4 and FP4, with scales that may themselves be quantised, or int8."""
    return (_eight_bits if "SCB" in tensors else _four_bits)(tensors, columns)


def _four_bits(tensors: Mapping[str, Tensor], columns: int) -> QuantisedWeight:
    """weight: uint8, two codes per byte, the first in the high half, row after row. weight.absmax: the
    largest magnitude of each `blocksize` values; uint8 if quantised, in blocks with their own scales and an
    offset. weight.quant_map: float32 [16], the value of each code. Raises ConfigError.
    """
    state = _state(tensors)
    rows, inputs = state["shape"]
    if inputs != columns or columns % 2:
        raise ConfigError(f"weight must have {columns} inputs by config.json, an even number, got {inputs}")
    _check_vector("weight", tensors["weight"].flatten(), torch.uint8, rows * columns // 2)
    _check_vector("weight.quant_map", tensors["weight.quant_map"], torch.float32, 16)
    size, absmax = state["blocksize"], tensors["weight.absmax"]
    if absmax.dtype == torch.uint8:
        nested, table, of_scales = absmax.flatten(), tensors.get(NESTED_MAP), tensors.get(NESTED_ABSMAX)
        if table is None or of_scales is None:
            raise ConfigError(f"weight.absmax is quantised, but {NESTED_MAP} or {NESTED_ABSMAX} is not there")
        count, every = len(nested), state["nested_blocksize"]
        _check_vector(NESTED_MAP, table, torch.float32, 256)
        _check_vector(NESTED_ABSMAX, of_scales, torch.float32, -(-count // every))
        of_code = of_scales[torch.arange(count, device=nested.device) // every]
        absmax = table[nested.int()] * of_code + state["nested_offset"]
    _check_vector("weight.absmax", absmax, torch.float32, -(-rows * columns // size))
    group = math.gcd(columns, size)  # a block may end within a row
    blocks = torch.arange(0, rows * columns, group, device=absmax.device) // size
    codes = tensors["weight"].reshape(rows, columns // 2)
    values = (codes >> 4) | ((codes & 15) << 4)
    scales = absmax[blocks].view(rows, columns // group)
    return QuantisedWeight(values, scales, codebook=tensors["weight.quant_map"])


def _eight_bits(tensors: Mapping[str, Tensor], columns: int) -> QuantisedWeight:
    """weight: int8 [N, K], in units of 1/127 of the row's largest magnitude, SCB float32 [N]."""
    weight, largest = tensors["weight"], tensors["SCB"]
    rows = len(weight)
    if weight.dtype != torch.int8 or tuple(weight.shape) != (rows, columns):
        raise ConfigError(
            f"weight must be int8 [outputs, {columns}], got {tuple(weight.shape)} {weight.dtype}"
        )
    _check_vector("SCB", largest, torch.float32, rows)
    if "weight_format" in tensors and int(tensors["weight_format"]) != 0:
        raise ConfigError("weight_format must be 0, rows: other layouts are not read")
    return QuantisedWeight(weight, largest.view(rows, 1) / 127)


def _state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
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


def _check_vector(name: str, tensor: Tensor, dtype: torch.dtype, size: int) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != (size,):
        raise ConfigError(f"{name} must be {(size,)} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")


def unpack(packed: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits], from the lowest bits, or from `places` in a word."""
    count = 32 // bits
    shifts = torch.tensor(places or range(count), dtype=torch.int32, device=packed.device) * bits
    values = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return values.to(torch.uint8).flatten(1)


def halves_to_bytes(halves: Tensor) -> Tensor:
    """uint8 [N, K] from 0 to 15 -> [N, K / 2], the even columns in the low half."""
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def regroup(groups: Tensor) -> tuple[Tensor | None, Tensor]:
    """Order the inputs by their group, groups [K], and split them into equal runs, as long as possible, each
    in one group. Returns the order int64 [K] (None: unchanged), and the group of each run.
    """
    groups = groups.long()
    order = None
    if bool((groups.diff() < 0).any()):
        order = torch.argsort(groups, stable=True)
        groups = groups[order]
    lengths = torch.unique_consecutive(groups, return_counts=True)[1].tolist()
    return order, groups[:: math.gcd(*lengths)]


def _from_words(
    words: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, of_input: Tensor, columns: int
) -> QuantisedWeight:
    """words [N, K * bits / 32] int32. Their bytes already have our layout, unless inputs are reordered."""
    _check("g_idx", of_input, (columns,))
    if not 0 <= int(of_input.min()) <= int(of_input.max()) < scales.shape[1]:
        raise ConfigError(f"g_idx must name groups from 0 to {scales.shape[1] - 1}")
    order, table = regroup(of_input)
    if order is None:
        values = words.contiguous().view(torch.uint8)
    else:
        values = unpack(words, bits)[:, order]
        values = halves_to_bytes(values) if bits == 4 else values
    if bits == 8:
        values = (values ^ 128).view(torch.int8)
    return _with_table(values, scales, zeros, order, table)


def _with_table(
    values: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, table: Tensor
) -> QuantisedWeight:
    if zeros is not None:
        zeros = zeros[:, table].contiguous() if bool(zeros.any()) else None
    return QuantisedWeight(values.contiguous(), scales[:, table].contiguous(), None, zeros, order)


def _even(columns: int, groups: int) -> Tensor:
    if groups < 1 or columns % groups:
        raise ConfigError(f"scales are for {groups} groups of inputs, which {columns} cannot be split into")
    return torch.arange(columns) // (columns // groups)


def _signed(values: Tensor, bits: int) -> Tensor:
    return (values.to(torch.int16) - MIDDLE[bits]).to(torch.int8)


def _table(name: str, scales: Tensor) -> Tensor:
    """Scales as [rows, groups]; the checkpoint may have fewer dimensions."""
    if scales.dim() < 2:
        return scales.reshape(-1, 1)
    if scales.dim() > 2:
        raise ConfigError(f"{name} must have two dimensions, got {_described(scales)}")
    return scales


def _check(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise ConfigError(f"{name} must be {wanted} by config.json, got {_described(tensor)}")


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


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
            (("weight", "weight.absmax", "weight.quant_map", f"{STATE}{kind}"), (NESTED_ABSMAX, NESTED_MAP))
            for kind in BITSANDBYTES_KINDS
        ),
        (("weight", "SCB"), ("weight_format",)),
    ),
    "fbgemm_fp8": ((("weight", "weight_scale"), ("input_scale_ub",)),),
}
# Suffixes that plain layers do not have.
KEYS = {
    "qweight", "weight_packed", "weight_scale", "weight_scale_inv", "_blocks", "_scales",
    "weight.absmax", "SCB",
}  # fmt: skip
UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale")


class CheckpointWeights:
    """quant: of the checkpoint; None: plain, or built here. names: of all its tensors."""

    def __init__(self, quant: CheckpointQuant | None, names: Collection[str]) -> None:
        self._quant, self._names = quant, names
        self._method = "built" if quant is None else quant.method

    def parts(self, source: str) -> dict[str, str]:
        """Suffix -> tensor of the quantised weight `source`; {} if it is plain. ConfigError if incomplete."""
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
        return set(self.parts(source).values()) or {source}

    def is_left_out(self, name: str) -> bool:
        """Scales of activations, keys and values, which are not quantised here, and spare biases."""
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
            if self._quant is None:
                return built(tensors, columns)
            if self._method == "awq":
                return awq(tensors, columns)
            if self._method == "gptq":
                return gptq(tensors, columns, self._quant.zero_shift)
            if self._method == "mxfp4":
                return mxfp4(tensors["_blocks"], tensors["_scales"], columns)
            if self._method == "bitsandbytes":
                return bitsandbytes(tensors, columns)
            if "weight_packed" in tensors:
                return packed(tensors, columns)
            return scaled(tensors, columns, self._quant.block)
        except ConfigError as error:
            raise ConfigError(f"{source.removesuffix('.weight')}: {error}") from error
