"""Block sizes of the kernels, by the rows of a tile and the dtype: one table for all GPUs.

The order of a sum depends on the block size. It is therefore chosen by the shape of a layer, never by a
batch's contents. Each choice compiles for an A100, an H100 and a B200 without spilled registers, and fits an
A100's shared memory (`make gpu-static`). None has been timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Blocks:
    """size: along the kernel's main dimension. warps, stages: triton's num_warps and num_stages. in_pieces:
    whether queries are read again for each block of keys, because registers cannot hold them all.
    """

    size: int
    warps: int = 4
    stages: int = 3
    in_pieces: bool = False

    @property
    def options(self) -> dict[str, int]:
        """As a launch takes them."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# By the rows of a tile. size: inputs that a program reads at a time; outputs of a program.
SHRINK = {1: Blocks(256), 16: Blocks(64), 64: Blocks(64)}
EXPAND = {1: Blocks(128), 16: Blocks(64), 64: Blocks(64, warps=8, stages=4)}
EXPAND_FLOAT32 = {1: Blocks(128), 16: Blocks(64, warps=8), 64: Blocks(32, warps=8, stages=2)}
PRODUCT = {16: Blocks(64), 64: Blocks(128)}


def expand_blocks(tile_size: int, dtype: torch.dtype) -> Blocks:
    """float32 takes three products for each of the others'."""
    return (EXPAND_FLOAT32 if dtype == torch.float32 else EXPAND)[tile_size]


def decode_blocks(rows: int, dim: int, dtype: torch.dtype) -> Blocks:
    """For a tile of `rows` queries of `dim` elements, one token of a sequence. A part of a sequence's keys is
    a multiple of the size.
    """
    size = rows * dim * dtype.itemsize
    if size <= 2**13:
        return Blocks(32)
    return Blocks(16, warps=8 if size <= 2**14 else 16, stages=2, in_pieces=True)


def prompt_blocks(rows: int, dim: int, dtype: torch.dtype) -> Blocks:
    """For a tile of `rows` queries of `dim` elements."""
    is_large = rows * dim * dtype.itemsize > 2**14
    if dtype == torch.float32:
        return Blocks(16 if is_large else 32, warps=8, stages=2, in_pieces=is_large)
    return Blocks(32, warps=8 if is_large or dim > 256 else 4)
