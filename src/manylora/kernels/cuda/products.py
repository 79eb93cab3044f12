"""Linear layers with quantised weights. A weight's format and the number of rows decide which kernel runs:

- 8-bit floats with one scale per output: torch._scaled_mm, if it passes a trial with the first weight of a
  shape; rows are then rounded to 8-bit floats, too;
- other weights: our own kernel, which widens them in registers, up to FEW_ROWS rows;
- more rows, and what our kernel does not support: the weight is dequantised before the product.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.kernels.cuda.arithmetic import has_fp8_units, quantise_rows
from manylora.kernels.cuda.grouped import SMALLEST_GROUP, WeightTable, quantised_rows, weight_table
from manylora.kernels.quantised import QuantisedWeight, quantised_linear
from manylora.kernels.spec import FP8

logger = logging.getLogger("manylora")

FEW_ROWS = 256  # up to this, weights are widened in registers; with more rows, before the product
TRIAL_ROWS = (3, 40)
TOLERANCE = 0.02  # relative to the largest output; rounding to bfloat16 causes 0.004


class ScaledProduct:
    """torch._scaled_mm, with rows of x rounded to e4m3 and one scale per row. It multiplies FP8 on tensor
    cores.

    inside: whether it applies the scales of rows and outputs itself; otherwise they are applied afterwards.
    """

    def __init__(self, weight: QuantisedWeight, *, inside: bool) -> None:
        self._weight, self._inside = weight, inside
        self._output_scales = weight.scales.float().T.contiguous()
        self._one = torch.ones((), device=weight.values.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Semantics: x @ W.T; x [T, K], contiguous, in the dtype of the scales -> [T, N]."""
        values, scales = quantise_rows(x)
        columns = self._weight.values.t()
        if self._inside:
            return torch._scaled_mm(values, columns, scales, self._output_scales, out_dtype=x.dtype)
        y = torch._scaled_mm(values, columns, self._one, self._one, out_dtype=torch.float32)
        return y.mul_(scales).mul_(self._output_scales).to(x.dtype)

    def __str__(self) -> str:
        return f"torch._scaled_mm, scales {'inside' if self._inside else 'afterwards'}"


@dataclass(frozen=True)
class WidenedProduct:
    """Our own kernel for few rows. table: None: it does not support the weight's groups."""

    weight: QuantisedWeight
    table: WeightTable | None

    @classmethod
    def of(cls, weight: QuantisedWeight) -> WidenedProduct:
        fits = weight.scales.shape[1] == 1 or weight.group_size % SMALLEST_GROUP == 0
        return cls(weight, weight_table([weight]) if fits else None)

    def __call__(self, x: Tensor) -> Tensor:
        """As `ScaledProduct`, without rounding x."""
        if self.table is None or len(x) > FEW_ROWS:
            return quantised_linear(x, self.weight, None)
        return quantised_rows(x, self.table)


class QuantisedLinears:
    """The products of all packed weights."""

    def __init__(self) -> None:
        self._passes: dict[tuple[tuple[int, int], torch.dtype, bool], bool] = {}
        # By the weight's id. A product holds its weight, so that the id is not reused.
        self._products: dict[int, ScaledProduct | WidenedProduct] = {}

    def pack(self, weight: QuantisedWeight) -> QuantisedWeight:
        """Prepare a weight. The first one of a shape may wait for the device."""
        if weight.is_plain:
            self._products[id(weight)] = self._scaled_product(weight) or WidenedProduct.of(weight)
        return weight

    def __call__(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        """As `ReferenceOps.linear`."""
        product = self._products.get(id(weight))
        if product is None:
            return quantised_linear(x, weight, bias)
        y = product(x.contiguous())
        return y if bias is None else y.add_(bias)

    def _scaled_product(self, weight: QuantisedWeight) -> ScaledProduct | None:
        """The first form that is correct on this device."""
        rows, columns = weight.shape
        if not _is_fp8_per_output(weight) or rows % 16 or columns % 16:
            return None
        dtype = weight.scales.dtype
        for inside in (True, False) if dtype == torch.bfloat16 else (False,):
            key = weight.shape, dtype, inside
            if key not in self._passes:
                reason = _refusal(weight, inside=inside)
                self._passes[key] = reason is None
                outcome = "" if reason is None else f" is not used: {reason}"
                product = ScaledProduct(weight, inside=inside)
                logger.info(
                    "float8_e4m3fn weights %d x %d for %s: %s%s", rows, columns, dtype, product, outcome
                )
            if self._passes[key]:
                return ScaledProduct(weight, inside=inside)
        return None


def fits_fp8_units(weight: QuantisedWeight) -> bool:
    """Whether experts with such weights are multiplied by FP8 tensor cores, with rows rounded to e4m3."""
    return _is_fp8_per_output(weight) and has_fp8_units(weight.values.device)


def _is_fp8_per_output(weight: QuantisedWeight) -> bool:
    return weight.values.dtype == FP8 and weight.scales.shape[1] == 1 and weight.offsets is None


def _refusal(weight: QuantisedWeight, *, inside: bool) -> str | None:
    """Why torch._scaled_mm cannot be used: it raised an error, or its result differs. None: it can."""
    some = weight.rows(slice(256))
    generator = torch.Generator().manual_seed(0)
    for count in TRIAL_ROWS:
        x = torch.randn(count, weight.shape[1], generator=generator)
        x = x.to(some.scales.dtype).to(some.values.device)
        values, scales = quantise_rows(x)
        want = (values.float() * scales) @ some.wide().float().T
        try:
            got = ScaledProduct(some, inside=inside)(x).float()
        except Exception as error:  # torch may raise anything; then something else is used
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        worst = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
        if not worst <= TOLERANCE:
            return f"its answer is {worst:.3g} of the largest away from the reference's"
    return None
