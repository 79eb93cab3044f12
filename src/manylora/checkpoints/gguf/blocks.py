"""The values of GGUF's block types. Widened to float32, each is bit-identical to gguf-py's.

Types whose values are small whole numbers times scales stay quantised. gguf-py widens the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from manylora.checkpoints.gguf.container import block_sizes
from manylora.checkpoints.quant.layouts import halves_to_bytes, mxfp4
from manylora.kernels.quantised import QuantisedWeight

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCALE_BYTES = 12  # of a Q4_K or Q5_K block: 8 scales and 8 minima of 6 bits
BITS = torch.arange(8, dtype=torch.uint8)
PAIRS = BITS[:4] * 2
IQ4 = torch.tensor(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=torch.int8
)  # the values of the 4-bit codes of IQ4_NL and IQ4_XS


def read_blocks(kind: str, data: Tensor, columns: int) -> QuantisedWeight:
    """data: uint8 [N, bytes per row] of a type in LAYOUTS -> a weight [N, columns]; scales in float32."""
    return LAYOUTS[kind](data.view(len(data), -1, block_sizes()[kind][1]), columns)


def widen(kind: str, data: Tensor, columns: int) -> Tensor:
    """data: as in `read_blocks`, of any type -> float32 [N, columns]."""
    if kind in LAYOUTS:
        return read_blocks(kind, data, columns).wide()
    from gguf import GGMLQuantizationType, dequantize

    return torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[kind]))


@lru_cache
def sample(kind: str) -> QuantisedWeight | None:
    """A weight of one block, which tells a type's fields and its groups. None if it is not in LAYOUTS."""
    if kind not in LAYOUTS:
        return None
    values, size = block_sizes()[kind]
    return read_blocks(kind, torch.zeros(1, size, dtype=torch.uint8), values)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _low_high(packed: Tensor) -> Tensor:
    """[N, B, P] bytes -> [N, B, 2 P] halves: all low ones, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _four(values: Tensor, scales: Tensor, offsets: Tensor | None, columns: int) -> QuantisedWeight:
    """values: uint8 from 0 to 15. With offsets the value is the stored one; without them it is 8 less."""
    zeros = None if offsets is None else torch.full(scales.shape, -8, dtype=torch.int8)
    halves = values.reshape(len(values), columns)
    return QuantisedWeight(halves_to_bytes(halves).contiguous(), scales, offsets, zeros)


def _eight(values: Tensor, scales: Tensor, offsets: Tensor | None, columns: int) -> QuantisedWeight:
    return QuantisedWeight(values.to(torch.int8).reshape(len(values), columns), scales, offsets)


def _scales_of_eight(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For Q4_K and Q5_K: a scale and an offset for each 32 of a block's 256 inputs, float32 [N, G]."""
    low, mid, high = blocks[..., 4 : 4 + SCALE_BYTES].split(4, dim=-1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=-1).float()
    minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), dim=-1).float()
    offsets = -(_half(blocks, 2).unsqueeze(-1) * minima)
    return (_half(blocks, 0).unsqueeze(-1) * scales).flatten(1), offsets.flatten(1)


def _q5_k(blocks: Tensor, columns: int) -> QuantisedWeight:
    first = 4 + SCALE_BYTES
    packed = blocks[..., first + 32 :].unflatten(-1, (4, 32))
    top = (blocks[..., first : first + 32].unsqueeze(-2) >> BITS.unsqueeze(-1)) & 1  # [N, B, 8, 32]
    values = _low_high(packed).flatten(-2) | (top.flatten(-2) << 4)
    return _eight(values, *_scales_of_eight(blocks), columns)


def _q6_k(blocks: Tensor, columns: int) -> QuantisedWeight:
    low = blocks[..., :128].unflatten(-1, (2, 64))
    values = _low_high(low).flatten(-2) | (_pairs(blocks[..., 128:192]) << 4)
    fine = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = _half(blocks, 208).unsqueeze(-1) * fine
    return _eight(values.to(torch.int8) - 32, scales.flatten(1), None, columns)


def _pairs(packed: Tensor) -> Tensor:
    """[N, B, 64] bytes -> [N, B, 256] values of 2 bits: for each 32 bytes, first all lowest bits."""
    return ((packed.unflatten(-1, (2, 1, 32)) >> PAIRS.unsqueeze(-1)) & 3).flatten(-3)


def _q2_k(blocks: Tensor, columns: int) -> QuantisedWeight:
    scales = _half(blocks, 80).unsqueeze(-1) * (blocks[..., :16] & 15).float()
    offsets = -(_half(blocks, 82).unsqueeze(-1) * (blocks[..., :16] >> 4).float())
    return _four(_pairs(blocks[..., 16:80]), scales.flatten(1), offsets.flatten(1), columns)


def _q3_k(blocks: Tensor, columns: int) -> QuantisedWeight:
    """One scale per 16 inputs. Values from -4 to 3."""
    high = (blocks[..., :32].unsqueeze(-2) >> BITS.unsqueeze(-1)) & 1  # [N, B, 8, 32]
    values = _pairs(blocks[..., 32:96]) + (high.flatten(-2) << 2) + 4
    upper = ((blocks[..., 104:108].unsqueeze(-2) >> PAIRS.unsqueeze(-1)) & 3).flatten(-2)
    fine = (_low_high(blocks[..., 96:104]) | (upper << 4)).to(torch.int8) - 32
    scales = _half(blocks, 108).unsqueeze(-1) * fine.float()
    return _four(values, scales.flatten(1), None, columns)


def _iq4_xs(blocks: Tensor, columns: int) -> QuantisedWeight:
    values = IQ4[_low_high(blocks[..., 8:].unflatten(-1, (8, 16))).int()]
    upper = ((blocks[..., 2:4].unsqueeze(-1) >> PAIRS) & 3).flatten(-2)
    lower = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(-2)
    scales = _half(blocks, 0).unsqueeze(-1) * ((lower | (upper << 4)).to(torch.int8) - 32).float()
    return _eight(values, scales.flatten(1), None, columns)


def _five(blocks: Tensor, at: int) -> Tensor:
    """Q5_0 and Q5_1: values from 0 to 31. at: the first byte of their fifth bits."""
    fifth = ((blocks[..., at : at + 4].unsqueeze(-1) >> BITS) & 1).flatten(-2) << 4  # [N, B, 32]
    return _low_high(blocks[..., at + 4 :]) | fifth


LAYOUTS: dict[str, Callable[[Tensor, int], QuantisedWeight]] = {
    "Q4_0": lambda b, n: _four(_low_high(b[..., 2:]), _half(b, 0), None, n),
    "Q4_1": lambda b, n: _four(_low_high(b[..., 4:]), _half(b, 0), _half(b, 2), n),
    "Q5_0": lambda b, n: _eight(_five(b, 2).to(torch.int8) - 16, _half(b, 0), None, n),
    "Q5_1": lambda b, n: _eight(_five(b, 4), _half(b, 0), _half(b, 2), n),
    "Q8_0": lambda b, n: _eight(b[..., 2:].contiguous().view(torch.int8), _half(b, 0), None, n),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda b, n: _four(_low_high(b[..., 16:].unflatten(-1, (4, 32))), *_scales_of_eight(b), n),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda b, n: _eight(IQ4[_low_high(b[..., 2:]).int()], _half(b, 0), None, n),
    "IQ4_XS": _iq4_xs,
    # Values from -1 to 2, one scale per 256 inputs.
    "TQ2_0": lambda b, n: _four(_pairs(b[..., :64]) + 7, _half(b, 64), None, n),
    "MXFP4": lambda b, n: mxfp4(
        halves_to_bytes(_low_high(b[..., 1:]).flatten(1)).unflatten(1, (-1, 16)), b[..., 0], n
    ),
}
"""The function that reads a type which stays quantised, from its blocks [N, B, bytes] and its columns."""
