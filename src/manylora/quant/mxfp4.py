"""MXFP4: 4-bit floats (e2m1) in which 32 inputs share a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from manylora.errors import ConfigError
from manylora.kernels.quantised import FLOAT4, QuantisedWeight

BLOCK = 32


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
            raise ConfigError(
                f"{name} must be uint8 {wanted} by config.json, got {tuple(tensor.shape)} "
                f"{str(tensor.dtype).removeprefix('torch.')}"
            )
    halved = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 128)
    codebook = torch.tensor(FLOAT4, dtype=torch.float32, device=blocks.device)
    return QuantisedWeight(blocks.reshape(rows, -1), halved, codebook=codebook)
