"""The values of GGUF's block types. Widened to float32, each is bit-identical to gguf-py's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manylora.kernels.quantised import QuantisedWeight
from manylora.quant.layouts import halves_to_bytes

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCALE_BYTES = 12  # of a Q4_K or Q5_K block: 8 scales and 8 minima of 6 bits
BITS = torch.arange(8, dtype=torch.uint8)


def read_blocks(kind: str, data: Tensor, columns: int) -> QuantisedWeight:
    """data: uint8 [N, bytes per row] of a type in LAYOUTS -> a weight [N, columns], scales in float32.

    Scales that a block stores as products of two numbers are multiplied in float32, as in gguf-py.
    """
    size, layout = LAYOUTS[kind]
    return layout(data.view(len(data), -1, size), columns)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, in float32 [N, B]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _low_high(packed: Tensor) -> Tensor:
    """[N, B, P] bytes -> [N, B, 2 P] halves: all low ones, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[N, B, 4] bytes -> [N, B, 32]: 16 where an input's bit is set."""
    return ((packed.unsqueeze(-1) >> BITS) & 1).flatten(-2) << 4


def _four(values: Tensor, scales: Tensor, offsets: Tensor | None, columns: int) -> QuantisedWeight:
    """values: uint8 from 0 to 15. With offsets the value is the stored one; without them it is 8 less."""
    zeros = None if offsets is None else torch.full(scales.shape, -8, dtype=torch.int8)
    halves = values.reshape(len(values), columns)
    return QuantisedWeight(halves_to_bytes(halves).contiguous(), scales, offsets, zeros)


def _eight(values: Tensor, scales: Tensor, offsets: Tensor | None, columns: int) -> QuantisedWeight:
    return QuantisedWeight(values.to(torch.int8).reshape(len(values), columns), scales, offsets)


def _q4_0(blocks: Tensor, columns: int) -> QuantisedWeight:
    return _four(_low_high(blocks[..., 2:]), _half(blocks, 0), None, columns)


def _q4_1(blocks: Tensor, columns: int) -> QuantisedWeight:
    return _four(_low_high(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2), columns)


def _q5_0(blocks: Tensor, columns: int) -> QuantisedWeight:
    values = (_low_high(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).to(torch.int8) - 16
    return _eight(values, _half(blocks, 0), None, columns)


def _q5_1(blocks: Tensor, columns: int) -> QuantisedWeight:
    values = _low_high(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _eight(values, _half(blocks, 0), _half(blocks, 2), columns)


def _q8_0(blocks: Tensor, columns: int) -> QuantisedWeight:
    values = blocks[..., 2:].contiguous().view(torch.int8)
    return QuantisedWeight(values.reshape(len(blocks), columns), _half(blocks, 0))


def _scales_of_eight(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For Q4_K and Q5_K: a scale and an offset for each 32 of a block's 256 inputs, float32 [N, G]."""
    low, mid, high = blocks[..., 4 : 4 + SCALE_BYTES].split(4, dim=-1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=-1).float()
    minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), dim=-1).float()
    offsets = -(_half(blocks, 2).unsqueeze(-1) * minima)
    return (_half(blocks, 0).unsqueeze(-1) * scales).flatten(1), offsets.flatten(1)


def _q4_k(blocks: Tensor, columns: int) -> QuantisedWeight:
    packed = blocks[..., 4 + SCALE_BYTES :].unflatten(-1, (4, 32))
    return _four(_low_high(packed), *_scales_of_eight(blocks), columns)


def _q5_k(blocks: Tensor, columns: int) -> QuantisedWeight:
    first = 4 + SCALE_BYTES
    packed = blocks[..., first + 32 :].unflatten(-1, (4, 32))
    top = (blocks[..., first : first + 32].unsqueeze(-2) >> BITS.unsqueeze(-1)) & 1  # [N, B, 8, 32]
    values = _low_high(packed).flatten(-2) | (top.flatten(-2) << 4)
    return _eight(values, *_scales_of_eight(blocks), columns)


def _q6_k(blocks: Tensor, columns: int) -> QuantisedWeight:
    """One scale per 16 inputs."""
    low = blocks[..., :128].unflatten(-1, (2, 64))
    shifts = (BITS[:4] * 2).unsqueeze(-1)
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3  # [N, B, 2, 4, 32]
    values = _low_high(low).flatten(-2) | (high.flatten(-3) << 4)
    fine = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = _half(blocks, 208).unsqueeze(-1) * fine
    return _eight(values.to(torch.int8) - 32, scales.flatten(1), None, columns)


LAYOUTS: dict[str, tuple[int, Callable[[Tensor, int], QuantisedWeight]]] = {
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1), "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k),
}  # fmt: skip
"""Bytes per block, and the function that reads it, by name of the type."""
PLAIN_FIELDS: tuple[str, ...] = ("values", "scales")
FIELDS: dict[str, tuple[str, ...]] = dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "Q6_K"), PLAIN_FIELDS)
FIELDS |= dict.fromkeys(("Q5_1", "Q5_K"), (*PLAIN_FIELDS, "offsets"))
FIELDS |= dict.fromkeys(("Q4_1", "Q4_K"), (*PLAIN_FIELDS, "offsets", "zeros"))
"""The fields of each type's QuantisedWeight."""
