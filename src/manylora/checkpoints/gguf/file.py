"""GgufFile: presents a GGUF file as a checkpoint with Hugging Face's names. Quantised weights look as
`manylora build` writes them, several tensors per weight, so that any code for such a checkpoint can read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manylora.checkpoints.gguf.blocks import PLAIN, read_blocks, sample, widen
from manylora.checkpoints.gguf.container import block_sizes, part_paths, read_parts
from manylora.checkpoints.gguf.sources import Source, Target, in_runs, read_targets
from manylora.checkpoints.quant.checkpoint_weights import PARTS
from manylora.errors import ConfigError
from manylora.kernels.quantised import QuantisedWeight

WIDE_BYTES = 2**22  # bytes of the file that are widened at a time
WIDE_VALUES = 2**21  # values that gguf-py widens at a time, with up to 30 bytes for each


class GgufFile:
    """A context manager with the methods of SafetensorsFile. path: any part. on_read: called with the number
    of bytes of each read. added_bytes: that quantised weights take in memory beyond the file's. Thread-safe.
    """

    def __init__(self, path: Path, on_read: Callable[[int], None] = lambda count: None) -> None:
        self.path, self._on_read = path, on_read
        self._tensors: dict[str, PlainTensor] = {}
        self._parts: dict[str, tuple[GgufTensor | MadeWeight, str]] = {}  # of quantised weights
        self.added_bytes = 0
        for name, target in read_targets(read_parts(path)).items():
            self._add(name, target)
        self._last: tuple[object, Any] | None = None  # parts or rows of one weight are asked for in turn
        self._open = ExitStack()
        self._parts_open: list[int] = []
        try:
            for part in part_paths(path):
                self._parts_open.append(os.open(part, os.O_RDONLY | os.O_CLOEXEC))
                self._open.callback(os.close, self._parts_open[-1])
        except OSError as error:
            self._open.close()
            raise ConfigError(f"{path}: {error.strerror}") from error

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._last = None
        self._open.close()

    def _add(self, name: str, target: Target) -> None:
        parts = [GgufTensor(self, part) for part in target.parts]
        kinds = {part.info.kind for part in target.parts}
        kind = kinds.pop() if target.stays and len(kinds) == 1 else None
        one = None if kind is None else sample(kind)
        if one is not None and target.runs is not None:  # inputs with one scale must stay together
            run = target.parts[0].info.shape[-1] // len(target.runs)
            one = one if run % one.group_size == 0 else None
        if kind is not None and one is not None:
            weight = parts[0] if target.make is None else MadeWeight(target, parts)
            stored = sum(part.stored_bytes for part in parts)
            self.added_bytes += stored * one.nbytes // block_sizes()[kind][1] - stored
            stem = name.removesuffix("weight")
            self._parts |= {stem + PARTS[field]: (weight, field) for field in one.tensors()}
        else:
            self._tensors[name] = parts[0] if target.make is None else MadeTensor(self, target, parts)

    def keys(self) -> list[str]:
        return [*self._tensors, *self._parts]

    def types(self) -> Iterator[str]:
        return (tensor.get_dtype() for tensor in self._tensors.values())

    def get_slice(self, name: str) -> PlainTensor:
        """A plain tensor. Does not read anything yet."""
        return self._tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        if name in self._tensors:
            return self._tensors[name].whole()
        weight, field = self._parts[name]
        return getattr(self.keep_last(weight, weight.quantised), field)

    def blocks(self, source: str, types: Collection[str]) -> tuple[str, Tensor] | None:
        """A quantised weight's type and bytes, uint8 [N, bytes per row]; None for other types, or several."""
        weight, _ = self._parts.get(source.removesuffix("weight") + PARTS["values"], (None, ""))
        return weight.blocks() if isinstance(weight, GgufTensor) and weight.type in types else None

    def keep_last(self, owner: object, make: Callable[[], Any]) -> Any:
        """What `make` returns, or returned when it was last called for the same owner."""
        last = self._last
        if last is None or last[0] is not owner:
            last = self._last = owner, make()
        return last[1]

    def read(self, part: int, offset: int, count: int) -> Tensor:
        """Bytes of a part of the file, uint8 [count]."""
        made = torch.empty(count, dtype=torch.uint8)
        view, done = memoryview(made.numpy().data), 0
        while done < count:
            got = os.preadv(self._parts_open[part], [view[done:]], offset + done)
            if got == 0:
                raise ConfigError(f"{self.path} is not a readable GGUF file: it was cut short")
            done += got
            self._on_read(got)
        return made


class PlainTensor:
    """Any plain tensor of a file: what can be said of it, and its rows in any form."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_bytes: int

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        """The type as safetensors names it; F32 for tensors that are widened when read."""
        return next(name for name, dtype in PLAIN.items() if dtype == self.dtype)

    def read_rows(self, start: int, out: Tensor) -> None:
        """Fill `out` with rows [start, start + len(out)), as in FileTensor."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        made = torch.empty(self.shape, dtype=self.dtype)
        self.read_rows(0, made.view(-1, self.shape[-1]) if len(self.shape) > 1 else made)
        return made

    def read_block(self, rows: range, columns: range) -> Tensor:
        """As in FileTensor. Rows are read completely, some at a time."""
        made = torch.empty((len(rows), len(columns)), dtype=self.dtype)
        width = self.shape[-1]
        step = max(1, WIDE_BYTES // width)
        for first in range(0, len(rows), step):
            part = made[first : first + step]
            whole = torch.empty((len(part), width), dtype=self.dtype)
            self.read_rows(rows.start + first, whole)
            part.copy_(whole[:, columns.start : columns.stop])
        return made

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        made = torch.empty((max(0, stop - start), *self.shape[1:]), dtype=self.dtype)
        self.read_rows(start, made)
        return made


class GgufTensor(PlainTensor):
    """One tensor of a file, or one of those stacked in it, with the checkpoint's order of rows and values."""

    def __init__(self, file: GgufFile, source: Source) -> None:
        self._file, self._source, self._info = file, source, source.info
        self.shape = source.shape or source.info.shape
        self.dtype = PLAIN.get(source.info.kind, torch.float32)
        self.stored_bytes = source.info.nbytes

    def read_rows(self, start: int, out: Tensor) -> None:
        info = self._info
        step = len(out)
        if len(info.shape) > 1:
            step = max(1, min(WIDE_BYTES // info.row_bytes, WIDE_VALUES // info.shape[-1]))
        for first in range(0, len(out), step):
            part = out[first : first + step]
            part.copy_(self._read(start + first, len(part)).view(part.shape))

    @property
    def type(self) -> str:
        return self._info.kind

    def quantised(self) -> QuantisedWeight:
        return read_blocks(*self.blocks(), self._info.shape[-1])

    def blocks(self) -> tuple[str, Tensor]:
        """Its type, and its rows as they are stored, uint8 [N, bytes per row]."""
        info, rows = self._info, self._source.rows
        data = self._file.read(info.part, info.offset, info.nbytes).view(info.shape[0], -1)
        return info.kind, data if rows is None else data[rows]

    def _read(self, start: int, count: int) -> Tensor:
        info, order = self._info, self._source.rows
        size = info.row_bytes if len(info.shape) > 1 else info.row_bytes // info.shape[0]
        wanted = None if order is None else order[start : start + count]
        low = start if wanted is None else int(wanted.min())
        high = start + count if wanted is None else int(wanted.max()) + 1
        data = self._file.read(info.part, info.offset + low * size, (high - low) * size)
        data = data.view(high - low, size)
        data = data if wanted is None else data[wanted - low]
        if info.kind not in PLAIN:
            return widen(info.kind, data, info.shape[-1])
        return self._source.change(data.reshape(-1).view(self.dtype))


class MadeTensor(PlainTensor):
    """Made of one or several tensors; in memory when it is read. In float32 unless all are of one type."""

    def __init__(self, file: GgufFile, target: Target, parts: list[GgufTensor]) -> None:
        assert target.make is not None and target.shape is not None
        self._file, self._make, self._parts = file, target.make, parts
        self.shape = target.shape
        dtypes = {part.dtype for part in parts}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self.stored_bytes = sum(part.stored_bytes for part in parts)

    def whole(self) -> Tensor:
        return self._file.keep_last(
            self, lambda: self._make([part.whole().to(self.dtype) for part in self._parts]).contiguous()
        )

    def read_rows(self, start: int, out: Tensor) -> None:
        out.copy_(self.whole()[start : start + len(out)].view(out.shape))

    def __getitem__(self, rows: slice | tuple[slice, slice]) -> Tensor:
        return self.whole()[rows]


@dataclass(frozen=True)
class MadeWeight:
    """The same of weights of one type, which stays quantised."""

    target: Target
    parts: list[GgufTensor]

    def quantised(self) -> QuantisedWeight:
        found = [part.quantised() for part in self.parts]
        tables: dict[str, Any] = {
            name: self._made([getattr(one, name) for one in found])
            for name in found[0].tensors()
            if name != "codebook"
        }
        return replace(found[0], **tables)

    def _made(self, parts: list[Tensor]) -> Tensor:
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        whole = whole if self.target.rows is None else whole[self.target.rows]
        return whole if self.target.runs is None else in_runs(whole, self.target.runs)
