"""Kernels for linear layers on quantised weights: PyTorch's and our own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from manylora.kernels.cuda.blocks import BlockChooser
from manylora.kernels.cuda.fp8 import has_units, quantise_rows
from manylora.kernels.cuda.grouped import SMALLEST_GROUP, quantised_rows, weight_table
from manylora.kernels.quantised import INT4_GROUPS, PackedInt4, QuantisedWeight, quantised_linear
from manylora.kernels.spec import FP8

FEW_ROWS = 256  # up to this, weights are widened in registers; with more rows, before the product
INT8_ROWS = 64  # torch's 8-bit kernel is for decoding
INNER_TILES = (8, 4, 2)  # innerKTiles of torch's 4-bit layout: K must be a multiple of 16 times it
TRIAL_ROWS = (3, 40)
TOLERANCE = 0.02  # relative to the largest output; rounding to bfloat16 causes 0.004


class QuantisedKernel(ABC):
    """One implementation of the product with quantised weights.

    most_rows: maximum rows of x that it supports. narrows: whether it quantises x to e4m3, with one scale per
    row.
    repacks: whether `pack` changes the layout, so that no other kernel can use the weight.
    """

    name: str
    most_rows: int | None = None
    narrows = False
    repacks = False

    @abstractmethod
    def takes(self, weight: QuantisedWeight) -> bool:
        """Whether it supports this format and shape."""

    def pack(self, weight: QuantisedWeight) -> QuantisedWeight | PackedInt4:
        """The weight in the kernel's layout, which replaces it."""
        return weight

    def prepare(self, packed: Any) -> Any:
        """Further arguments for calls, created once per weight."""
        return None

    @abstractmethod
    def __call__(self, x: Tensor, packed: Any, prepared: Any) -> Tensor:
        """Semantics: x @ W.T; x [T, K], contiguous, in the dtype of the scales -> [T, N]."""


class ScaledRows(QuantisedKernel):
    """FP8 tensor cores; scales of rows and outputs are applied inside the kernel."""

    name = "torch._scaled_mm, scales inside"
    narrows = True

    def takes(self, weight: QuantisedWeight) -> bool:
        return _whole_fp8(weight) and weight.scales.dtype == torch.bfloat16

    def prepare(self, packed: QuantisedWeight) -> Tensor:
        return packed.scales.float().T.contiguous()

    def __call__(self, x: Tensor, packed: QuantisedWeight, prepared: Tensor) -> Tensor:
        values, scales = quantise_rows(x)
        return torch._scaled_mm(values, packed.values.t(), scales, prepared, out_dtype=x.dtype)


class ScaledAfterwards(QuantisedKernel):
    """FP8 tensor cores with tensor-wide scales of 1; scales of rows and outputs are applied afterwards."""

    name = "torch._scaled_mm, scales behind it"
    narrows = True

    def takes(self, weight: QuantisedWeight) -> bool:
        return _whole_fp8(weight)

    def prepare(self, packed: QuantisedWeight) -> tuple[Tensor, Tensor]:
        return packed.scales.float().T.contiguous(), torch.ones((), device=packed.values.device)

    def __call__(self, x: Tensor, packed: QuantisedWeight, prepared: tuple[Tensor, Tensor]) -> Tensor:
        output_scales, one = prepared
        values, scales = quantise_rows(x)
        y = torch._scaled_mm(values, packed.values.t(), one, one, out_dtype=torch.float32)
        return y.mul_(scales).mul_(output_scales).to(x.dtype)


class TorchInt8(QuantisedKernel):
    name = "torch._weight_int8pack_mm"
    most_rows = INT8_ROWS

    def takes(self, weight: QuantisedWeight) -> bool:
        return weight.values.dtype == torch.int8 and _per_output(weight)

    def prepare(self, packed: QuantisedWeight) -> Tensor:
        return packed.scales.flatten()

    def __call__(self, x: Tensor, packed: QuantisedWeight, prepared: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, packed.values, prepared)


class TorchInt4(QuantisedKernel):
    """Its layout replaces ours, so it is used for any number of rows."""

    name = "torch._weight_int4pack_mm"
    repacks = True

    def takes(self, weight: QuantisedWeight) -> bool:
        rows, columns = weight.shape
        return (
            weight.values.dtype == torch.uint8
            and weight.offsets is not None
            and weight.scales.dtype == torch.bfloat16
            and weight.group_size in INT4_GROUPS
            and rows % 8 == 0
            and columns % (16 * INNER_TILES[-1]) == 0
        )

    def pack(self, weight: QuantisedWeight) -> PackedInt4:
        assert weight.offsets is not None
        inner = next(tiles for tiles in INNER_TILES if weight.shape[1] % (16 * tiles) == 0)
        swapped = (weight.values << 4) | (weight.values >> 4)  # the first of two inputs goes to the high half
        packed = torch._convert_weight_to_int4pack(swapped, inner)
        table = torch.stack((weight.scales.T, weight.offsets.T), dim=-1).contiguous()
        return PackedInt4(packed, table, weight.group_size)

    def __call__(self, x: Tensor, packed: PackedInt4, prepared: None) -> Tensor:
        return torch._weight_int4pack_mm(x, packed.packed, packed.group_size, packed.table)


class Widened(QuantisedKernel):
    """Our own kernel, which widens weights in registers. chooser: of block sizes."""

    name = "our own kernel in the Triton language"
    most_rows = FEW_ROWS

    def __init__(self, chooser: BlockChooser | None = None) -> None:
        self._chooser = chooser

    def takes(self, weight: QuantisedWeight) -> bool:
        return weight.scales.shape[1] == 1 or weight.group_size % SMALLEST_GROUP == 0

    def prepare(self, packed: QuantisedWeight) -> Any:
        return weight_table([packed])

    def __call__(self, x: Tensor, packed: QuantisedWeight, prepared: Any) -> Tensor:
        return quantised_rows(x, prepared, self._chooser)


class Units(Widened):
    """Our own kernel for FP8 tensor cores. Experts always use it, because torch's kernels do not support
    tables.
    """

    name = "our own kernel on FP8 units"
    narrows = True

    def takes(self, weight: QuantisedWeight) -> bool:
        return weight.values.dtype == FP8 and _per_output(weight) and has_units(weight.values.device)

    def prepare(self, packed: QuantisedWeight) -> Any:
        return weight_table([packed], narrow=True)


class WidenedBefore(QuantisedKernel):
    """Dequantises weights before the product, some rows at a time."""

    name = "widened before the product"

    def takes(self, weight: QuantisedWeight) -> bool:
        return True

    def __call__(self, x: Tensor, packed: QuantisedWeight, prepared: None) -> Tensor:
        return quantised_linear(x, packed, None)


def all_kernels(chooser: BlockChooser | None = None) -> tuple[QuantisedKernel, ...]:
    """All kernels in order of preference without measurements. chooser: of block sizes."""
    torch_kernels = ScaledRows(), ScaledAfterwards(), TorchInt8(), TorchInt4()
    return (*torch_kernels, Widened(chooser), WidenedBefore(), Units(chooser))


def refusal(kernel: QuantisedKernel, weight: QuantisedWeight) -> str | None:
    """Why a kernel cannot be used: it raised an error, or its result differs from the reference. None: it
    can.
    """
    some = weight.rows(slice(256))
    made = torch.Generator().manual_seed(0)
    for count in TRIAL_ROWS:
        x = torch.randn(count, weight.shape[1], generator=made).to(some.scales.dtype).to(some.values.device)
        wide = x.float()
        if kernel.narrows:
            values, scales = quantise_rows(x)
            wide = values.float() * scales
        want = wide @ some.wide().float().T
        try:
            packed = kernel.pack(some)
            got = kernel(x, packed, kernel.prepare(packed)).float()
        except Exception as error:  # a library's kernel may raise anything; then another one is used
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        worst = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
        if not worst <= TOLERANCE:
            return f"its answer is {worst:.3g} of the largest away from the reference's"
    return None


def _per_output(weight: QuantisedWeight) -> bool:
    return weight.scales.shape[1] == 1 and weight.offsets is None


def _whole_fp8(weight: QuantisedWeight) -> bool:
    rows, columns = weight.values.shape
    return weight.values.dtype == FP8 and _per_output(weight) and rows % 16 == columns % 16 == 0
