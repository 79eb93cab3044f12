"""The part of an adapter held by one rank of tensor and pipeline parallelism. Arithmetic on arrays.

Fused modules are split part by part (q, k and v; up and gate). Rows therefore have the same plain order in
every source and need no interleaving as in TensorRT-LLM's loader. Experts are split one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from manylora.adapters.geometry import CacheGeometry, Layout
from manylora.adapters.modules import LoraModule, Split
from manylora.adapters.tensors import Adapter, AdapterRow, FileAdapter


@dataclass(frozen=True, eq=False)
class AdapterPart(Adapter):
    """One rank's part of an adapter, with the whole's digest. num_pages: on each rank; 0: unknown."""

    num_pages: int = 0


class Slicer(Protocol):
    """Selects what a rank's AdapterStore holds; implemented in `manylora.ranks.adapters`. modules: of a
    rank, on each of `num_layers` layers (the largest stage's) the largest of any stage. num_ranks: that share
    an adapter.
    """

    modules: Mapping[int, LoraModule]
    num_layers: int
    num_ranks: int

    def slice(self, adapter: Adapter | FileAdapter) -> AdapterPart:
        """This rank's part."""

    def layout(self, adapter: Adapter | FileAdapter, geometry: CacheGeometry, element_bytes: int) -> Layout:
        """The layout of that part in its pages."""

    def agree(self, number: int) -> int:
        """The smallest number among all ranks."""


def pipeline_layers(num_layers: int, pp: int, rank: int) -> range:
    """Layers of a pipeline rank: equal shares; the first ranks get one of the remaining layers each."""
    share, more = divmod(num_layers, pp)
    first = rank * share + min(rank, more)
    return range(first, first + share + (rank < more))


def slice_rows(
    rows: Iterable[AdapterRow],
    modules: Mapping[int, LoraModule],
    local: Mapping[int, LoraModule],
    tp: int,
    tp_rank: int,
    place: Callable[[int, int], int | None],
) -> list[AdapterRow]:
    """The rows of a stage, each split by `slice_row`. modules, local: with the whole model's layers. place:
    for a module id and a layer, returns the stage's number of that layer, or None if the stage has no such
    row.
    """
    found = []
    for row in rows:
        number = place(row.module_id, row.layer)
        if number is not None:
            module, own = (those[row.module_id].at(row.layer) for those in (modules, local))
            found.append(replace(slice_row(row, module, own, tp, tp_rank), layer=number))
    return found


def slice_row(row: AdapterRow, module: LoraModule, local: LoraModule, tp: int, rank: int) -> AdapterRow:
    """A [r, local in], B [local out, r] and, with DoRA, m [local out] of one rank. r is never split.

    local: the module of one rank. Columns of A are split if the base layer is row-parallel, rows of B and m
    if it is column-parallel. If a dimension has fewer shares than ranks, as with few key-value heads,
    neighbouring ranks have the same share. Experts that are not shared are assigned round robin.
    """
    if module.split is Split.NONE or (module.in_dim, module.out_dim) == (local.in_dim, local.out_dim):
        return row
    ends = np.cumsum(module.row_sizes(row.format))
    a, b, m, _ = np.split(row.payload, ends)
    a = a.reshape(module.experts, row.format.rank, -1)[_experts(module, local, rank)]
    b = b.reshape(module.out_dim, row.format.rank)
    if module.split is Split.A_COLS:
        a = a[..., _share(a.shape[-1], local.in_dim // local.experts, tp, rank)]
        b = b.reshape(module.experts, -1)[_experts(module, local, rank)]
        m = m.reshape(module.experts, len(m) // module.experts)[_experts(module, local, rank)].ravel()
    else:
        keep = rows_of_rank(module, local, tp, rank)
        b, m = b[keep], m[keep] if row.format.dora else m
    return replace(row, payload=np.concatenate((a.ravel(), b.ravel(), m)), content=b"")


def rows_of_rank(module: LoraModule, local: LoraModule, tp: int, rank: int) -> np.ndarray:
    """Indices of the rows of a column-parallel module's B, magnitude or bias that a rank has."""
    parts, shares = module.parts or (module.out_dim,), local.parts or (local.out_dim,)
    firsts = np.cumsum((0, *parts))
    numbers: Sequence[int] = range(len(parts))
    if module.experts > 1:
        numbers = numbers[_experts(module, local, rank)]
    found = []
    for number, size in zip(numbers, shares, strict=True):
        share = _share(parts[number], size, tp, rank)
        found.append(np.arange(firsts[number] + share.start, firsts[number] + share.stop))
    return np.concatenate(found)


def _experts(module: LoraModule, local: LoraModule, rank: int) -> slice:
    number = rank % (module.experts // local.experts)
    return slice(number * local.experts, (number + 1) * local.experts)


def _share(size: int, local: int, tp: int, rank: int) -> slice:
    """The share of one of `tp` ranks that hold `local` each of `size` in total."""
    number = rank * (size // local) // tp
    return slice(number * local, (number + 1) * local)
