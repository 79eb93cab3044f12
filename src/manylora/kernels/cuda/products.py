"""Linear layers with quantised weights: the fastest correct kernel for each shape of weight and each class of
rows.

A kernel is tried with the first weight of a shape, and timed with it if the device can measure. A step's
number of rows selects a kernel only by its class, so within a class a row is computed in the same way.
Kernels that round x to 8 bits replace only each other, never the others, whatever their speed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from manylora.kernels.cuda import launch
from manylora.kernels.cuda.blocks import MOST_SECONDS, BlockChooser
from manylora.kernels.cuda.grouped import ROW_CLASSES
from manylora.kernels.cuda.quantised import (
    QuantisedKernel,
    Units,
    Widened,
    WidenedBefore,
    all_kernels,
    refusal,
)
from manylora.kernels.quantised import PackedInt4, QuantisedWeight, quantised_linear

logger = logging.getLogger("manylora")

MANY_ROWS = 1024  # represents all numbers beyond the classes
TIMED_ROWS = (*ROW_CLASSES, MANY_ROWS)
DECODING = ROW_CLASSES[:2]  # the classes that decide the layout

Kernels = tuple[QuantisedKernel, ...]
"""One for each of TIMED_ROWS."""


@dataclass(frozen=True)
class Product:
    """A weight in its kernels' layout. weight: held, so that its id is not reused."""

    weight: QuantisedWeight | PackedInt4
    kernels: Kernels
    prepared: dict[QuantisedKernel, Any]

    @classmethod
    def of(cls, weight: QuantisedWeight, kernels: Kernels) -> Product:
        packed = kernels[0].pack(weight)
        return cls(packed, kernels, {kernel: kernel.prepare(packed) for kernel in kernels})

    def __call__(self, x: Tensor) -> Tensor:
        kernel = self.kernels[next((i for i, most in enumerate(ROW_CLASSES) if len(x) <= most), -1)]
        return kernel(x.contiguous(), self.weight, self.prepared[kernel])


class QuantisedLinears:
    """Chooses the kernels of each weight and runs them.

    kernels: in order of preference without measurements. chooser: measures them, as it does block sizes, and
    stores its choices.
    """

    def __init__(self, kernels: Sequence[QuantisedKernel] | None = None, chooser: BlockChooser | None = None):
        self._chooser = chooser or BlockChooser()
        self._kernels = tuple(all_kernels(self._chooser) if kernels is None else kernels)
        self._units = Units(self._chooser)
        self._works: dict[tuple[str, QuantisedKernel], bool] = {}
        self._chosen: dict[str, Kernels] = {}
        self._ready: dict[int, Product] = {}
        self._left = MOST_SECONDS  # seconds left for measuring, over all weights

    def pack(self, weight: QuantisedWeight) -> QuantisedWeight | PackedInt4:
        """A weight in its kernels' layout. The original may be freed. The first weight of a shape waits for
        the device.
        """
        if not weight.is_plain:
            return weight
        name = _describe(weight)
        if name not in self._chosen:
            self._chosen[name] = self._choose(weight, name)
            logger.info("%s: %s", name, _say(self._chosen[name]))
        made = Product.of(weight, self._chosen[name])
        self._ready[id(made.weight)] = made
        return made.weight

    def narrows_experts(self, weight: QuantisedWeight) -> bool:
        """Whether experts with such weights use FP8 tensor cores. The first call tries the kernel and waits
        for the device.
        """
        return self._units.takes(weight) and self._passes(self._units, weight, says=True)

    def __call__(self, x: Tensor, weight: QuantisedWeight | PackedInt4, bias: Tensor | None) -> Tensor:
        """As `ReferenceOps.linear`."""
        known = self._ready.get(id(weight))
        if known is None:
            assert isinstance(weight, QuantisedWeight), "only what was packed here is in a layout of torch's"
            return quantised_linear(x, weight, bias)
        y = known(x)
        return y if bias is None else y.add_(bias)

    def _choose(self, weight: QuantisedWeight, name: str) -> Kernels:
        able = [k for k in self._kernels if k.takes(weight) and self._passes(k, weight)]
        layouts: dict[str, list[QuantisedKernel]] = {}
        for kernel in able:
            if kernel.narrows == able[0].narrows:
                layouts.setdefault(kernel.name if kernel.repacks else "kept", []).append(kernel)
        if not self._chooser.can_measure or self._left <= 0:
            return self._fastest(weight, name, layouts)
        started = time.perf_counter()
        try:
            with self._chooser.measuring(self._left):
                self._compile(weight, able)
                return self._fastest(weight, name, layouts)
        except torch.OutOfMemoryError:
            logger.warning("no memory is left to measure the products of %s", name)
            return self._fastest(weight, name, layouts)
        finally:
            self._left -= time.perf_counter() - started

    def _compile(self, weight: QuantisedWeight, kernels: Sequence[QuantisedKernel]) -> None:
        """Compile our own kernels in parallel, with every choice of block sizes."""
        trial = _Trial(weight)
        with launch.compiling():
            for kernel in kernels:
                for rows in _rows_of(kernel) if isinstance(kernel, Widened) else ():
                    trial(kernel, rows)

    def _fastest(
        self, weight: QuantisedWeight, name: str, layouts: dict[str, list[QuantisedKernel]]
    ) -> Kernels:
        """The fastest according to the chooser's measurements. Otherwise the first ones."""
        trial, found = _Trial(weight), {}
        for layout, kernels in layouts.items():
            found[layout] = tuple(self._for_rows(trial, name, kernels, rows) for rows in TIMED_ROWS)

        def decode(layout: str) -> None:
            for kernel, rows in zip(found[layout], DECODING, strict=False):
                trial(kernel, rows)

        return found[self._chosen_of(f"{name}, layout", tuple(found), decode)]

    def _for_rows(
        self, trial: _Trial, name: str, kernels: Sequence[QuantisedKernel], rows: int
    ) -> QuantisedKernel:
        offered = {kernel.name: kernel for kernel in kernels if rows in _rows_of(kernel)}
        shape = f"{name}, {rows} rows"
        return offered[self._chosen_of(shape, tuple(offered), lambda one: trial(offered[one], rows))]

    def _chosen_of(self, shape: str, names: tuple[str, ...], run: Any) -> str:
        return names[0] if len(names) == 1 else self._chooser.choose(shape, names, run)

    def _passes(self, kernel: QuantisedKernel, weight: QuantisedWeight, says: bool = False) -> bool:
        """Whether its product with some rows of the first weight of this shape was correct."""
        name = _describe(weight)
        if (name, kernel) not in self._works:
            reason = None if isinstance(kernel, WidenedBefore) else refusal(kernel, weight)
            self._works[name, kernel] = reason is None
            if reason is not None:
                logger.info("%s: %s is not used: %s", name, kernel.name, reason)
            elif says:
                logger.info("%s: %s", name, kernel.name)
        return self._works[name, kernel]


class _Trial:
    """Runs kernels on a weight, in each kernel's layout, which is created once."""

    def __init__(self, weight: QuantisedWeight) -> None:
        self._weight, self._ready = weight, dict[QuantisedKernel, tuple[Any, Any]]()

    @cached_property
    def _x(self) -> Tensor:
        dtype, device = self._weight.scales.dtype, self._weight.scales.device
        return torch.ones(MANY_ROWS, self._weight.shape[1], dtype=dtype, device=device)

    def __call__(self, kernel: QuantisedKernel, rows: int) -> Tensor:
        if kernel not in self._ready:
            packed = kernel.pack(self._weight)
            self._ready[kernel] = packed, kernel.prepare(packed)
        return kernel(self._x[:rows], *self._ready[kernel])


def _rows_of(kernel: QuantisedKernel) -> tuple[int, ...]:
    """The entries of TIMED_ROWS that it supports."""
    return tuple(rows for rows in TIMED_ROWS if kernel.most_rows is None or rows <= kernel.most_rows)


def _describe(weight: QuantisedWeight) -> str:
    """Everything that its kernels and their speed depend on."""
    kind = {torch.uint8: "4-bit"}.get(weight.values.dtype, str(weight.values.dtype).removeprefix("torch."))
    rows, columns = weight.shape
    groups = "" if weight.scales.shape[1] == 1 else f" in groups of {weight.group_size}"
    offsets = "" if weight.offsets is None else " with offsets"
    dtype = str(weight.scales.dtype).removeprefix("torch.")
    return f"{kind} weights {rows} x {columns}{groups}{offsets} for {dtype}"


def _say(kernels: Kernels) -> str:
    """For example: a up to 64 rows, then b."""
    pairs = zip([kernel.name for kernel in kernels], TIMED_ROWS, strict=True)
    last = [(name, max(rows for _, rows in same)) for name, same in groupby(pairs, key=itemgetter(0))]
    parts = [f"{name} up to {rows} rows" for name, rows in last[:-1]]
    return ", ".join([*parts, f"then {last[-1][0]}" if parts else last[-1][0]])
