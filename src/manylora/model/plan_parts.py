"""Elements of a plan: rows of a checkpoint's tensors, and the weights of a linear layer and of a norm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from manylora.config.model import ModelConfig


@dataclass(frozen=True)
class RowSlice:
    """Rows [start, start + rows) of the checkpoint tensor `source`, which has `total` rows.

    experts > 0: the tensor stacks the matrices of this many experts; the rows are of number `expert`. step:
    distance between rows.
    """

    source: str
    start: int
    rows: int
    total: int
    expert: int = 0
    experts: int = 0
    step: int = 1

    @property
    def places(self) -> slice:
        return slice(self.start, self.start + self.rows * self.step, self.step)


@dataclass(frozen=True)
class WeightSpec:
    """One of the model's tensors: slices of the checkpoint's, stacked. columns 0: a vector.

    first_column, all_columns: offset of the columns in the checkpoint, and how many it has; 0: no others.
    is_matrix: of a linear layer, so it is packed. transposed: stored as [in, out]. plus_one: add 1 after
    loading, in float32, because bfloat16 would round small stored weights away. wide: kept in float32, like
    the arithmetic that uses it. depthwise: stored as [N, 1, columns].
    """

    slices: tuple[RowSlice, ...]
    columns: int = 0
    is_matrix: bool = False
    transposed: bool = False
    plus_one: bool = False
    first_column: int = 0
    all_columns: int = 0
    wide: bool = False
    depthwise: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(piece.rows for piece in self.slices)
        return (rows, self.columns) if self.columns else (rows,)

    @property
    def column_range(self) -> range:
        return range(self.first_column, self.first_column + self.columns)

    def with_all_columns(self) -> WeightSpec:
        return replace(self, columns=self.all_columns or self.columns, first_column=0, all_columns=0)

    def take_columns(self, columns: range) -> WeightSpec:
        """Some columns of a spec that has all of them."""
        return replace(self, columns=len(columns), first_column=columns.start, all_columns=self.columns)

    def take_rows(self, *runs: range) -> WeightSpec:
        """These rows of the fused tensor, one run after the other."""
        pieces = []
        for run in runs:
            first = 0
            for piece in self.slices:
                start, stop = max(run.start, first), min(run.stop, first + piece.rows)
                if start < stop:
                    at = piece.start + (start - first) * piece.step
                    pieces.append(replace(piece, start=at, rows=stop - start))
                first += piece.rows
        return replace(self, slices=tuple(pieces))

    def checkpoint_shape(self, piece: RowSlice) -> tuple[int, ...]:
        columns = self.all_columns or self.columns
        if not columns:
            return (piece.experts, piece.total) if piece.experts else (piece.total,)
        if self.depthwise:
            return (piece.total, 1, columns)
        shape = (columns, piece.total) if self.transposed else (piece.total, columns)
        return (piece.experts, *shape) if piece.experts else shape


Plan = dict[str, WeightSpec]
"""Our names of the model's weights, and their sources."""


def linear(name: str, pieces: Iterable[RowSlice], columns: int, biased: bool, config: ModelConfig) -> Plan:
    """A weight and, if there is one, its bias. pieces: slices whose source is the layer's name."""
    weight, bias = (
        tuple(replace(piece, source=piece.source + suffix) for piece in pieces)
        for suffix in (".weight", ".bias")
    )
    specs = {f"{name}.weight": WeightSpec(weight, columns, True, config.transposed_weights)}
    return specs | {f"{name}.bias": WeightSpec(bias)} if biased else specs


def norm(name: str, source: str, size: int, config: ModelConfig) -> Plan:
    exact = {"plus_one": config.norm.endswith("plus_one"), "wide": config.norm.endswith("wide")}
    weight = WeightSpec((whole(f"{source}.weight", size),), **exact)
    if config.norm.startswith("rms") or not config.norm_bias:
        return {f"{name}.weight": weight}
    return {f"{name}.weight": weight, f"{name}.bias": WeightSpec((whole(f"{source}.bias", size),))}


def matrix(source: str, rows: int, columns: int) -> WeightSpec:
    return WeightSpec((whole(source, rows),), columns, is_matrix=True)


def whole(source: str, rows: int) -> RowSlice:
    return RowSlice(source, 0, rows, rows)
