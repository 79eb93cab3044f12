"""GgufFile: presents a GGUF file as a checkpoint with Hugging Face's names. Quantised weights look as
`manylora build` writes them, several tensors per weight, so that any code for such a checkpoint can read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manylora.errors import ConfigError
from manylora.gguf.blocks import FIELDS, PLAIN, read_blocks
from manylora.gguf.config import FACTORS, family_of, tensor_name
from manylora.gguf.container import TensorInfo
from manylora.gguf.parts import part_paths, read_parts
from manylora.kernels.quantised import QuantisedWeight
from manylora.quant.checkpoint_weights import PARTS

EMBEDDING = "token_embd.weight"
WIDE_BYTES = 2**22  # bytes of the file that are widened at a time


class GgufFile:
    """A context manager that closes the file. Has the methods of SafetensorsFile. Thread-safe.

    path: for a file in several parts, any of them. on_read: called with the number of bytes of each read.
    Raises ConfigError.
    """

    def __init__(self, path: Path, on_read: Callable[[int], None] = lambda count: None) -> None:
        self.path, self._on_read = path, on_read
        header = read_parts(path)
        family = family_of(header)
        metadata, kind = header.metadata, header.metadata["general.architecture"]
        heads = metadata.get(f"{kind}.attention.head_count")
        counts = {"attn_q": heads, "attn_k": metadata.get(f"{kind}.attention.head_count_kv", heads)}
        self._tensors: dict[str, GgufTensor] = {}
        self._parts: dict[str, tuple[GgufTensor, str]] = {}  # of quantised weights
        for name, info in header.tensors.items():
            if name in FACTORS.values():
                continue
            turned = counts.get(name.split(".")[-2] if "." in name else "") if family.turned else None
            minus = 1 if family.plus_one and name.endswith("norm.weight") else 0
            tensor = GgufTensor(self, info, turned, minus)
            named = tensor_name(name, family)
            if info.kind in PLAIN or name == EMBEDDING:
                self._tensors[named] = tensor
                continue
            if len(info.shape) != 2:
                raise ConfigError(f"{path}: {name} is stored as {info.kind}, which only matrices are")
            stem = named.removesuffix("weight")
            self._parts |= {stem + PARTS[field]: (tensor, field) for field in FIELDS[info.kind]}
        self._last: tuple[GgufTensor, QuantisedWeight] | None = None  # its parts are requested one by one
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

    def keys(self) -> list[str]:
        return [*self._tensors, *self._parts]

    def types(self) -> Iterator[str]:
        """Types of the plain tensors, by safetensors' names."""
        return (tensor.get_dtype() for tensor in self._tensors.values())

    def get_slice(self, name: str) -> GgufTensor:
        """A plain tensor. Does not read anything yet."""
        return self._tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        if name in self._tensors:
            return self._tensors[name].whole()
        tensor, field = self._parts[name]
        last = self._last
        if last is None or last[0] is not tensor:
            last = self._last = tensor, tensor.quantised()
        return getattr(last[1], field)

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


class GgufTensor:
    """One tensor of a file, with the order of rows and the values of Hugging Face's checkpoint.

    heads: number of heads within which llama.cpp reordered the rows; None: not reordered. minus: subtracted
    from each value.
    """

    def __init__(self, file: GgufFile, info: TensorInfo, heads: Any, minus: int) -> None:
        self._file, self._info, self._minus = file, info, minus
        self._rows: Tensor | None = None  # row numbers in the file
        count = info.shape[0]
        if heads is not None:
            if not isinstance(heads, int) or heads < 1 or count % heads or count // heads % 2:
                raise ConfigError(
                    f"{file.path}: {info.name} has {count} rows, which are not of {heads} heads"
                )
            self._rows = torch.arange(count).view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def get_shape(self) -> list[int]:
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The type as safetensors names it; F32 for tensors that are widened when read."""
        return self._info.kind if self._info.kind in PLAIN else "F32"

    @property
    def dtype(self) -> torch.dtype:
        return PLAIN[self.get_dtype()]

    def whole(self) -> Tensor:
        made = torch.empty(self._info.shape, dtype=self.dtype)
        self.read_rows(0, made)
        return made

    def read_rows(self, start: int, out: Tensor) -> None:
        """Fill `out` with rows [start, start + len(out)), as in FileTensor."""
        step = max(1, WIDE_BYTES // self._info.row_bytes) if len(self._info.shape) > 1 else len(out)
        for first in range(0, len(out), step):
            part = out[first : first + step]
            part.copy_(self._read(start + first, len(part)).view(part.shape))

    def read_block(self, rows: range, columns: range) -> Tensor:
        """As in FileTensor. Rows are read completely, some at a time."""
        made = torch.empty((len(rows), len(columns)), dtype=self.dtype)
        step = max(1, WIDE_BYTES // self._info.row_bytes)
        for first in range(0, len(rows), step):
            part = made[first : first + step]
            whole = torch.empty((len(part), self._info.shape[-1]), dtype=self.dtype)
            self.read_rows(rows.start + first, whole)
            part.copy_(whole[:, columns.start : columns.stop])
        return made

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self._info.shape[0])
        made = torch.empty((max(0, stop - start), *self._info.shape[1:]), dtype=self.dtype)
        self.read_rows(start, made)
        return made

    def quantised(self) -> QuantisedWeight:
        """The whole weight."""
        info = self._info
        data = self._file.read(info.part, info.offset, info.nbytes).view(info.shape[0], -1)
        data = data if self._rows is None else data[self._rows]
        return read_blocks(info.kind, data, info.shape[-1])

    def _read(self, start: int, count: int) -> Tensor:
        """Rows of a plain or widened tensor."""
        info = self._info
        size = info.row_bytes if len(info.shape) > 1 else info.row_bytes // info.shape[0]
        wanted = None if self._rows is None else self._rows[start : start + count]
        low = start if wanted is None else int(wanted.min())
        high = start + count if wanted is None else int(wanted.max()) + 1
        data = self._file.read(info.part, info.offset + low * size, (high - low) * size).view(
            high - low, size
        )
        data = data if wanted is None else data[wanted - low]
        if info.kind not in PLAIN:
            return read_blocks(info.kind, data, info.shape[-1]).wide()
        made = data.reshape(-1).view(PLAIN[info.kind])
        return made - self._minus if self._minus else made
