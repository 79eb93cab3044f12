"""Bounds: the largest adapter that is read. Headers are checked against it before any value is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manylora.adapters.modules import LoraModule
from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import RowFormat

OF_ROW = 6  # tensors per pair of matrices: A, B, a magnitude, biases under three names
OF_LAYER = 16  # norms and their biases
LEAST_TENSORS = 4096  # so that an adapter of another model gets a specific error
LEAST_ROWS = 1024
LARGEST_RANK = 1024  # of any row in an adapter of a known model
MAX_COLUMNS = 64  # of lora_config; numbers other than 3 and 4 are refused later
OF_TENSOR = 512  # header bytes per tensor; half of them for its name
MOST_WORK = 2**39  # about 8 decompositions of 4096 by 4096, a minute or two
MAX_ITEM = 8  # bytes per number
SMALL_HEADER = 2**20  # bytes for metadata besides the tensors


@dataclass(frozen=True)
class Bounds:
    """The defaults fit any model.

    rank: of a row. rows: layers times modules. elements: numbers in all matrices; padded: with all rows as
    wide as the widest; packed: with several 8-bit floats in the space of one number. tensors: of one file.
    work: multiplications for decomposing weights of the base model; a server allows few of them per load.
    num_layers: of the model; None: unknown.
    roots: resolved folders that must contain the files after links are followed; None: any.
    """

    rank: int = 2**15
    rows: int = 2**15
    elements: int = 2**30
    padded: int = 2**30
    tensors: int = 2**17
    packed: int = 1
    work: int = 2**62
    num_layers: int | None = None
    roots: tuple[Path, ...] | None = None

    @classmethod
    def of(
        cls,
        modules: Mapping[int, LoraModule],
        num_layers: int,
        rank: int,
        elements: int | None = None,
        packed: int = 1,
    ) -> Bounds:
        """Bounds for adapters of a model. elements: its cache's capacity; None: the largest adapter's."""
        places = [(m, num_layers if m.layers is None else len(m.layers)) for m in modules.values()]
        row = RowFormat(rank, dora=True)
        largest, rows = sum(m.row_elements(row) * count for m, count in places), sum(n for _, n in places)
        tensors = OF_LAYER * num_layers + sum(OF_ROW * m.experts * count for m, count in places)
        return cls(
            rank=rank,
            rows=max(LEAST_ROWS, rows),
            elements=largest if elements is None else elements,
            padded=max((m.row_elements(row) for m, _ in places), default=0) * rows,
            tensors=max(LEAST_TENSORS, tensors),
            packed=packed,
            work=MOST_WORK,
            num_layers=num_layers,
        )

    def within(self, roots: Sequence[Path] | None) -> Bounds:
        """A copy with these roots."""
        return replace(self, roots=None if roots is None else tuple(root.resolve() for root in roots))

    @classmethod
    def of_any_rank(cls, modules: Mapping[int, LoraModule], num_layers: int) -> Bounds:
        """For tools: any rank. The server decides what it serves."""
        largest = cls.of(modules, num_layers, LARGEST_RANK)
        elements = max(cls.elements, largest.elements)
        return replace(largest, rank=cls.rank, elements=elements, work=cls.work, num_layers=None)

    @property
    def header_bytes(self) -> int:
        return SMALL_HEADER + OF_TENSOR * self.tensors

    @property
    def checkpoint_bytes(self) -> int:
        """Maximum size of a file that must be read completely before its content is known."""
        return self.header_bytes + MAX_ITEM * self.elements

    def check_rank(self, rank: int) -> None:
        """Raises AdapterInvalidError, with TensorRT-LLM's text."""
        if rank > self.rank:
            raise AdapterInvalidError(
                f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank ({self.rank})"
            )

    def check_elements(self, elements: int, *, float8: bool = False) -> None:
        """float8: the numbers stay 8-bit floats. Raises AdapterInvalidError."""
        most = self.elements * (self.packed if float8 else 1)
        if elements > most:
            raise AdapterInvalidError(
                f"its tensors have {str(elements)[:40]} numbers, at most {most} can be held: the adapter is "
                "too large for the LoRA cache (lora_cache_host_memory_bytes, lora_cache_gpu_memory_fraction)"
            )

    def check_decompositions(self, kind: str, work: int) -> None:
        """work: inputs * outputs * min(inputs, outputs), summed over modules. Raises AdapterInvalidError."""
        if work > self.work:
            raise AdapterInvalidError(
                f"{kind} needs a decomposition of each adapted weight of the base, which is too long for a "
                "load: convert the adapter once with manylora convert --base, or with PEFT's "
                "path_initial_model_for_weight_conversion"
            )

    def check_table(self, weights: tuple[int, ...], config: tuple[int, ...], *, float8: bool = False) -> None:
        """Check shapes [1, rows, W] and [1, rows, 3 or 4] of padded tensors. Raises AdapterInvalidError."""
        rows = max(shape[1] if len(shape) > 1 else 1 for shape in (weights, config))
        if rows > self.rows or math.prod(config) > MAX_COLUMNS * self.rows:
            raise AdapterInvalidError(
                f"lora_config of shape {str(list(config))[:80]} beside lora_weights of "
                f"{str(list(weights))[:80]}: an adapter of this model has at most {self.rows} rows"
            )
        if math.prod(weights) > self.padded:
            self.check_elements(math.prod(weights), float8=float8)

    def check_rows(self, rows: int) -> None:
        """Raises AdapterInvalidError."""
        if rows > self.rows:
            raise AdapterInvalidError(f"it has {rows} rows, an adapter of this model has at most {self.rows}")

    def allows(self, path: Path) -> bool:
        """Whether the file at this path, with all links resolved, may be read."""
        return self.roots is None or any(path.is_relative_to(root) for root in self.roots)


ANY_MODEL = Bounds()
