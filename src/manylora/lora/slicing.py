"""The part of an adapter that one rank of tensor and pipeline parallelism holds. Arithmetic on arrays.

Fused modules are cut part by part (q, k and v; up and gate), so their rows stay in the plain order in every
source, and need not be interleaved beforehand as TensorRT-LLM's loader does. Experts are cut one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from manylora.errors import ConfigError
from manylora.lora.modules import LoraModule, Split
from manylora.lora.tensors import AdapterRow


def pipeline_layers(num_layers: int, pp: int, rank: int) -> range:
    """Layers of a pipeline rank: equal shares, the remainder one each to the first ranks."""
    share, more = divmod(num_layers, pp)
    first = rank * share + min(rank, more)
    return range(first, first + share + (rank < more))


def slice_rows(
    rows: Iterable[AdapterRow], modules: Mapping[int, LoraModule], tp: int, tp_rank: int, layers: range
) -> list[AdapterRow]:
    """Rows of `layers`, each cut for one rank of `tp`; layer numbers stay global. Raises ConfigError."""
    return [slice_row(row, modules[row.module_id], tp, tp_rank) for row in rows if row.layer in layers]


def slice_row(row: AdapterRow, module: LoraModule, tp: int, rank: int) -> AdapterRow:
    """A [r, local in], B [local out, r] and, with DoRA, m [local out] of one rank; r is never cut.

    Columns of A are cut where the base layer is row-parallel, rows of B and m where it is column-parallel.
    Raises ConfigError when tp does not divide the dimension, or a part of a fused one.
    """
    if tp == 1 or module.split is Split.NONE:
        return row
    rank_a, ends = module.experts * row.format.rank, np.cumsum(module.row_sizes(row.format))
    a, b, m, _ = np.split(row.payload, ends)
    a, b = a.reshape(rank_a, -1), b.reshape(module.out_dim, row.format.rank)
    if module.split is Split.A_COLS:
        start, stop = _share(module, module.in_dim // module.experts, tp, rank)
        a = a[:, start:stop]
    else:
        keep = _rows_of_rank(module, tp, rank)
        b, m = b[keep], m[keep] if row.format.dora else m
    return replace(row, payload=np.concatenate((a.ravel(), b.ravel(), m)), content=b"")


def interleave_rows(b: np.ndarray, module: LoraModule, tp: int) -> np.ndarray:
    """Rows of a fused B or magnitude, in the rank-major order [q0 k0 v0 q1 k1 v1 …] of upstream's loader, in
    which a plain contiguous cut is right. Raises ConfigError as `slice_row` does."""
    return b[np.concatenate([_rows_of_rank(module, tp, rank) for rank in range(tp)])]


def _rows_of_rank(module: LoraModule, tp: int, rank: int) -> np.ndarray:
    found, first = [], 0
    for part in module.parts or (module.out_dim,):
        start, stop = _share(module, part, tp, rank)
        found.append(np.arange(first + start, first + stop))
        first += part
    return np.concatenate(found)


def _share(module: LoraModule, size: int, tp: int, rank: int) -> tuple[int, int]:
    share, rest = divmod(size, tp)
    if rest:
        raise ConfigError(f"{module.name} has a dimension of {size}, which {tp} ranks cannot share equally")
    return rank * share, (rank + 1) * share
