"""Linear layers with several weights in one launch, plain or quantised. Each tile of rows has its own weight.

Weights are not moved. A table has the distance of each weight from the first, because a distance, unlike an
address, can be known to be aligned. A quantised weight is widened in registers. For 8-bit floats, rows may
instead be rounded to 8-bit floats, too, and multiplied by FP8 tensor cores.

How many rows a single quantised weight has decides what multiplies it:

- 8-bit floats with one scale per output: torch._scaled_mm, if it passes a trial with the first weight of a
  shape; rows are then rounded to 8-bit floats, too;
- other weights: our own kernel, up to FEW_ROWS rows;
- more rows, and what our kernel does not support: the weight is dequantised before the product.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.arithmetic import (
    _dot,
    _dot_e4m3,
    _from_e4m3,
    as_bytes,
    has_fp8_units,
    is_interpreted,
    quantise_rows,
    widens,
)
from manylora.kernels.cuda.launch import PRODUCT, launch
from manylora.kernels.cuda.plan import TILE
from manylora.kernels.quantised import QuantisedWeight, quantised_linear
from manylora.kernels.spec import FP8, Weight

PLAIN, INT8, E4M3, INT4 = range(4)
logger = logging.getLogger("manylora")

FEW_ROWS = 256  # up to this, weights are widened in registers; with more rows, before the product
TRIAL_ROWS = (3, 40)
TOLERANCE = 0.02  # relative to the largest output; rounding to bfloat16 causes 0.004
PARTS = 3  # per weight: values, scales, offsets
KINDS = {torch.int8: INT8, FP8: E4M3, torch.uint8: INT4}
ALIGNMENTS = (16, 8, 4, 2, 1)
SMALLEST_GROUP = 16  # minimum inputs of a block


@dataclass(frozen=True)
class WeightTable:
    """Weights [N, K] of one kind. values, scales, offsets: of the first weight; 8-bit float values as bytes.

    distances [E, PARTS] int64: distance in elements from the first weight to each weight. align: distances of
    values are multiples of this many elements. groups: scales per output, 0: none. narrow: rows are rounded
    to e4m3 as well.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor
    distances: Tensor
    align: int
    kind: int
    shape: tuple[int, int]
    groups: int
    has_offsets: bool
    narrow: bool = False


@triton.jit
def _weights(
    values, scales, offsets, start, n, num_in, num_out, KIND: tl.constexpr, GROUP: tl.constexpr,
    OFFSETS: tl.constexpr, TYPE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Inputs [start, start + BLOCK_K), which are of one group, of outputs n: [BLOCK_K, BLOCK_N] in TYPE, or
    NARROW: as codes. A scale of a whole output is left to the caller."""
    rows, there = n.to(tl.int64), n < num_out
    if KIND == 3:
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)
        inside = (byte < num_in // 2)[:, None] & there[None, :]
        at = rows[None, :] * (num_in // 2) + byte[:, None]
        both = tl.load(values + at, mask=inside, other=0).to(tl.int32)
        found = tl.permute(tl.join(both & 15, both >> 4), (0, 2, 1)).reshape(BLOCK_K, BLOCK_N) - 8
    else:
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < num_in)[:, None] & there[None, :]
        found = tl.load(values + rows[None, :] * num_in + k[:, None], mask=inside, other=0)
    if KIND != 0 and not NARROW:
        wide = _from_e4m3(found) if KIND == 2 else found.to(tl.float32)
        if GROUP > 0:
            at = rows * (num_in // GROUP) + start // GROUP
            wide *= tl.load(scales + at, mask=there, other=0).to(tl.float32)[None, :]
            if OFFSETS:
                wide += tl.load(offsets + at, mask=there, other=0).to(tl.float32)[None, :]
        found = wide.to(TYPE)
    return found


@triton.jit(do_not_specialize=["num_rows"])
def _grouped(
    y, x, x_scales, tiles, all_values, all_scales, all_offsets, distances, x_stride, num_rows, num_in,
    num_out,
    KIND: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, TILED: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    first, number = tile.to(tl.int64) * BLOCK_M, 0
    count = tl.minimum(num_rows - first, BLOCK_M).to(tl.int32)
    if TILED:
        count = tl.load(tiles + tile * TILE + 1)
        first, number = tl.load(tiles + tile * TILE).to(tl.int64), tl.load(tiles + tile * TILE + 3)
    if count == 0:
        return
    here = distances + number * PARTS
    values = all_values + tl.multiple_of(tl.load(here), ALIGN)
    scales, offsets = all_scales + tl.load(here + 1), all_offsets + tl.load(here + 2)
    m, n = tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = first + m
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_in, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mine = (m < count)[:, None] & (k < num_in)[None, :]
        xs = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=mine, other=0)
        weights = _weights(
            values, scales, offsets, start, n, num_in, num_out, KIND, GROUP, OFFSETS, x.dtype.element_ty,
            BLOCK_K, BLOCK_N, NARROW,
        )  # fmt: skip
        if NARROW:  # noqa: SIM108 - a compile-time branch
            total = _dot_e4m3(xs, weights, total, WIDEN)
        else:
            total = _dot(xs, weights, total, WIDEN)
    if NARROW:
        total *= tl.load(x_scales + rows, mask=m < count, other=0)[:, None]
    if KIND != 0 and GROUP == 0:
        total *= tl.load(scales + n, mask=n < num_out, other=0).to(tl.float32)[None, :]
    to = y + rows[:, None] * num_out + n[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=(m < count)[:, None] & (n < num_out)[None, :])


def weight_table(weights: Sequence[Weight], narrow: bool = False) -> WeightTable:
    """weights: of one shape and kind, on one device, contiguous. The caller must keep them in place.

    narrow: only for 8-bit floats with one scale per output, on a device that `has_units`.
    """
    quantised = [w for w in weights if isinstance(w, QuantisedWeight)]
    plain = [w for w in weights if isinstance(w, Tensor)]
    assert len(weights) in (len(quantised), len(plain)), "weights of a table are of one kind, and not packed"
    if plain:
        parts = [(w, w, w) for w in plain]
        kind, groups, has_offsets = PLAIN, 0, False
        shape = plain[0].shape[0], plain[0].shape[1]
    else:
        one = quantised[0]
        kind, groups, shape = KINDS[one.values.dtype], one.scales.shape[1], one.shape
        has_offsets = one.offsets is not None
        parts = [
            (as_bytes(w.values), w.scales, w.scales if w.offsets is None else w.offsets) for w in quantised
        ]
    assert all(part.is_contiguous() for three in parts for part in three)
    assert groups < 2 or shape[1] // groups % SMALLEST_GROUP == 0, "groups are multiples of a block of inputs"
    first = parts[0]
    distances = [[_elements(a, b) for a, b in zip(first, three, strict=True)] for three in parts]
    align = next(size for size in ALIGNMENTS if all(three[0] % size == 0 for three in distances))
    table = torch.tensor(distances, dtype=torch.int64, device=first[0].device)
    assert not narrow or (kind == E4M3 and groups == 1 and not has_offsets), "rounds rows for FP8 units only"
    return WeightTable(*first, table, align, kind, shape, groups, has_offsets, narrow)


def _elements(start: Tensor, other: Tensor) -> int:
    elements, rest = divmod(other.data_ptr() - start.data_ptr(), start.element_size())
    assert rest == 0, "memory is aligned to whole elements"
    return elements


def grouped_linear(x: Tensor, tiles: Tensor, tile_size: int, table: WeightTable) -> Tensor:
    """Semantics, for each tile (first, count, _, e): y[first:first+count] = x[first:first+count] @ W[e].T

    x [P, K] in the dtype of plain weights or of scales, last dimension contiguous -> [P, N]. tiles [n, TILE]
    int32, covering all of x, with at most tile_size rows each.
    """
    return _launch(x, tiles, tile_size, tiles.shape[0], table)


def quantised_rows(x: Tensor, table: WeightTable) -> Tensor:
    """Semantics: x @ W.T, with a table of one weight; x [T, K] -> [T, N]."""
    size = 16 if x.shape[0] <= 16 else 64
    return _launch(x, None, size, triton.cdiv(x.shape[0], size), table)


def _launch(x: Tensor, tiles: Tensor | None, tile_size: int, count: int, table: WeightTable) -> Tensor:
    num_out, num_in = table.shape
    dtype, widen, x_scales = x.dtype, widens(x.dtype), x
    if table.narrow:
        values, x_scales = quantise_rows(x)
        x, widen = as_bytes(values), is_interpreted()
    y = torch.empty((x.shape[0], num_out), dtype=dtype, device=x.device)
    block_k = 128 // x.element_size()  # so that the stages fit shared memory for any dtype
    group = num_in // table.groups if table.groups else 0
    if table.groups > 1:
        block_k = min(block_k, group & -group)  # its power-of-two factor: a block never spans two groups
    if table.groups == 1 and not table.has_offsets:
        group = 0
    blocks = PRODUCT[tile_size]
    if count:
        launch(
            _grouped, (count, triton.cdiv(num_out, blocks.size)), y, x, x_scales,
            y if tiles is None else tiles, table.values, table.scales, table.offsets, table.distances,
            x.stride(0), x.shape[0], num_in, num_out,
            KIND=table.kind, GROUP=group, OFFSETS=table.has_offsets, TILED=tiles is not None, TILE=TILE,
            PARTS=PARTS, ALIGN=table.align, BLOCK_M=tile_size, BLOCK_N=blocks.size, BLOCK_K=block_k,
            WIDEN=widen, NARROW=table.narrow, **blocks.options,
        )  # fmt: skip
    return y


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
