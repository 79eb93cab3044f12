"""GgufFile: presents a GGUF file as a checkpoint with Hugging Face's names, made of parts of its tensors.
Quantised weights look as `manylora build` writes them, several tensors per weight, so that any code for such
a checkpoint can read it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manylora.checkpoints.gguf.blocks import PLAIN, read_blocks, sample, widen
from manylora.checkpoints.gguf.config import FACTORS, architecture_of
from manylora.checkpoints.gguf.container import (
    Header,
    Metadata,
    TensorInfo,
    block_sizes,
    part_paths,
    read_parts,
)
from manylora.checkpoints.gguf.names import Names
from manylora.checkpoints.quant.layouts import PARTS
from manylora.errors import ConfigError
from manylora.kernels.quantised import QuantisedWeight

LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")
CONVOLUTIONS = ("ssm_conv1d.weight", "shortconv.conv.weight")
SMALL = (
    "position_embd.weight", "token_types.weight", "cls.weight", "cls.output.weight", "dense_2.weight",
    "dense_3.weight",
)  # fmt: skip
VECTORS = ("ssm_a", "ssm_d", "ssm_norm.weight")
ONE_ROW = ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
LATENT = ("attn_k_b.weight", "attn_v_b.weight")
AFTER_KEYS = ("linear_attn.in_proj_qkv", "linear_attn.conv1d")
TILED = (
    *AFTER_KEYS, "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a",
    "linear_attn.A_log", "linear_attn.dt_bias",
)  # fmt: skip
MOST_STACKED = 2**12
KEYS_AND_VALUES = "self_attn.kv_b_proj.weight"


@dataclass(frozen=True)
class Source:
    """A tensor of the file, or a part of it. rows: in the checkpoint's order. change: of values."""

    info: TensorInfo
    rows: Tensor | None = None
    shape: tuple[int, ...] | None = None
    change: Callable[[Tensor], Tensor] = lambda values: values


@dataclass(frozen=True)
class Target:
    """A tensor of the checkpoint. make, shape: from its parts; None: of its only part. stays: quantised, with
    these `rows` of its parts, and the inputs in equal runs in the order `runs`; None: the file's order.
    """

    parts: tuple[Source, ...]
    make: Callable[[Sequence[Tensor]], Tensor] | None = None
    shape: tuple[int, ...] | None = None
    stays: bool = True
    rows: Tensor | None = None
    runs: Tensor | None = None


def read_targets(header: Header, *, partial: bool = False) -> dict[str, Target]:
    """By names in the checkpoint, or their own name if the architecture lacks them. partial: the tensors are
    those of an adapter, of any layers. Raises ConfigError.
    """
    return _Reader(header).targets(partial)


class _Reader:
    def __init__(self, header: Header) -> None:
        self._header, self._own = header, architecture_of(header)
        self._one = Metadata(header, header.metadata["general.architecture"])

    def targets(self, partial: bool) -> dict[str, Target]:
        made: dict[str, Target] = {}
        joined: dict[str, dict[str, Source]] = {}
        for name, info in self._header.tensors.items():
            place = LAYER.fullmatch(name)
            if name in FACTORS.values() or (place and not partial and int(place[1]) >= self._one.layers):
                continue
            if place is None:
                made |= self._named(_names(name, self._own.outside) or (name,), info, name)
                continue
            prefix, rest = f"{self._own.layers}.{int(place[1])}.", place[2]
            stem, _, end = rest.rpartition(".")
            whole = next((one for one, parts in self._own.joined.items() if stem in parts), None)
            if rest in LATENT:
                joined.setdefault(prefix + KEYS_AND_VALUES, {})[rest] = Source(info)
            elif whole is not None:
                joined.setdefault(f"{prefix}{whole}.{end}", {})[stem] = Source(info)
            else:
                made |= self._named(_names(rest, self._own.names, prefix) or (name,), info, rest)
        return made | {name: self._joined(name, parts) for name, parts in joined.items()}

    def _joined(self, name: str, parts: dict[str, Source]) -> Target:
        latent = name.endswith(KEYS_AND_VALUES)
        order = LATENT if latent else next(o for n, o in self._own.joined.items() if f"{n}." in name)
        missing = [one for one in order if one not in parts]
        if missing:
            raise ConfigError(f"{self._header.path} lacks a tensor {missing[0]}, which {name} is made of")
        found = tuple(parts[one] for one in order)
        shapes = [source.info.shape for source in found]
        fits = shapes[0][1:] == shapes[1][1:]
        if latent:
            fits = [len(one) for one in shapes] == [3, 3] and shapes[0][:2] == (shapes[1][0], shapes[1][2])
        if not fits:
            raise self._error(
                f"{found[0].info.name} and {found[1].info.name} have the shapes "
                f"{list(shapes[0])} and {list(shapes[1])}, which do not belong together"
            )
        if not latent:
            for source in found:
                self._check_kind(source.info)
            count = sum(source.info.shape[0] for source in found)
            rows = torch.arange(count)
            if self._own.delta_grouped:  # the rows of q, k, v and z in groups of one key head
                keys = self._one.count("ssm.group_count")
                key, value = self._one.count("ssm.state_size") * keys, self._one.count("ssm.inner_size")
                if count != 2 * key + 2 * value or value % keys:
                    raise self._error(f"q, k, v and z have {count} rows, which are not of {keys} key heads")
                groups = [part.view(keys, -1) for part in rows.split([key, key, value, value])]
                rows = torch.cat(groups, dim=1).view(-1)
            shape = count, *found[0].info.shape[1:]
            return Target(found, lambda parts: torch.cat(list(parts))[rows], shape, rows=rows)
        (heads, rank, dim), values = found[0].info.shape, found[1].info.shape[1]
        return Target(  # k [heads, rank, dim] and v [heads, values, rank]
            found,
            lambda parts: torch.cat((parts[0].transpose(1, 2), parts[1]), dim=1).flatten(0, 1),
            (heads * (dim + values), rank),
            stays=False,
        )

    def _named(self, names: tuple[str, ...], info: TensorInfo, rest: str) -> dict[str, Target]:
        """names: of tensors that have the rows of `info` one after the other."""
        if "{}" not in names[0]:
            found, offset, row = {}, info.offset, info.nbytes // info.shape[0]
            for name, rows in zip(names, self._sizes(info, len(names)), strict=True):
                part = replace(info, shape=(rows, *info.shape[1:]), offset=offset)
                found[name] = self._target(name, part, rest)
                offset += rows * row
            return found
        count, *shape = info.shape
        if not shape or count > MOST_STACKED:
            raise self._error(
                f"{info.name} has the shape {list(info.shape)}; at most {MOST_STACKED} "
                "matrices in one tensor are read"
            )
        size = info.nbytes // count
        made: dict[str, Target] = {}
        for number in range(count):
            one = replace(info, shape=tuple(shape), offset=info.offset + number * size)
            made |= self._named(tuple(name.format(number) for name in names), one, rest)
        return made

    def _sizes(self, info: TensorInfo, count: int) -> list[int]:
        if count != 3:
            return [info.shape[0] // count] * count
        q = self._one.heads * self._one.head_dim
        if info.shape[0] <= q:
            raise self._error(
                f"{info.name} has {info.shape[0]} rows, which are not q, k and v of "
                f"{self._one.heads} heads of {self._one.head_dim}"
            )
        return [q, (info.shape[0] - q) // 2, (info.shape[0] - q) // 2]

    def _check_kind(self, info: TensorInfo) -> None:
        if info.kind not in PLAIN and len(info.shape) != 2:
            raise self._error(f"{info.name} is stored as {info.kind}, which only matrices are")

    def _target(self, name: str, info: TensorInfo, rest: str) -> Target:
        if name.endswith(ONE_ROW):
            info = replace(info, shape=(1, info.shape[-1]))
        elif rest in VECTORS or (len(info.shape) == 2 and name.endswith("bias")):
            info = replace(info, shape=(math.prod(info.shape),))
        self._check_kind(info)
        source = Source(info, self._rows(name, info))
        if rest == "ssm_a":
            source = replace(source, change=lambda values: (-values.float()).log())
        elif self._own.plus_one and name.endswith("norm.weight") and rest != "ssm_norm.weight":
            source = replace(source, change=lambda values: values - 1)
        if rest in CONVOLUTIONS:
            source = replace(source, shape=(info.shape[0], 1, info.shape[-1]))
        if self._own.flipped and len(info.shape) == 2 and name.startswith(self._own.layers):
            return Target((source,), lambda parts: parts[0].T, info.shape[::-1])
        if self._own.tiled and rest == "ssm_out.weight":
            if info.shape[-1] % self._one.count("ssm.time_step_rank"):
                raise self._not_of_heads(info, info.shape[-1], "inputs")
            runs = self._value_heads(1)
            return Target((source,), lambda parts: in_runs(parts[0], runs), info.shape, runs=runs)
        if rest == "position_embd.weight" and self._own.padded:
            rows, width = self._own.padded, info.shape[-1]
            return Target(
                (source,),
                lambda parts: torch.cat((parts[0].new_zeros(rows, width), parts[0])),
                (rows + info.shape[0], width),
                stays=False,
            )
        return Target((source,), stays=rest not in SMALL)

    def _rows(self, name: str, info: TensorInfo) -> Tensor | None:
        stem, count, dim = name.rpartition(".")[0] or name, info.shape[0], self._one.head_dim
        stem = name if name.endswith(("A_log", "dt_bias")) else stem
        if self._own.turned and stem.endswith(("q_proj", "k_proj")):
            if count % dim or dim % 2:
                raise self._error(f"{info.name} has {count} rows, which are not of heads of {dim}")
            return torch.arange(count).view(-1, dim // 2, 2).transpose(1, 2).reshape(-1)
        if self._own.grouped and stem.endswith("query_key_value"):
            kv = (count // dim - self._one.heads) // 2
            if kv < 1 or count != (self._one.heads + 2 * kv) * dim or self._one.heads % kv:
                raise self._error(
                    f"{info.name} has {count} rows, which are not q, k and v of "
                    f"{self._one.heads} heads of {dim}"
                )
            parts = torch.arange(count).split([self._one.heads * dim, kv * dim, kv * dim])
            return torch.cat([part.view(kv, -1) for part in parts], dim=1).view(-1)
        if self._own.tiled and stem.endswith(TILED):
            heads = self._one.count("ssm.time_step_rank")
            keys = 2 * self._one.count("ssm.state_size") * self._one.count("ssm.group_count")
            first = keys if stem.endswith(AFTER_KEYS) else 0
            if count - first < heads or (count - first) % heads:
                raise self._not_of_heads(info, count, "rows")
            values = first + self._value_heads((count - first) // heads)
            return torch.cat((torch.arange(first), values))
        return None

    def _value_heads(self, dim: int) -> Tensor:
        """Row numbers in the file of a delta rule's value heads in the checkpoint's order."""
        heads, keys = self._one.count("ssm.time_step_rank"), self._one.count("ssm.group_count")
        if heads % keys:
            raise self._error(f"{heads} value heads cannot share {keys} key heads equally")
        return torch.arange(heads * dim).view(heads // keys, keys, dim).transpose(0, 1).reshape(-1)

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._header.path}: {what}")

    def _not_of_heads(self, info: TensorInfo, count: int, what: str) -> ConfigError:
        heads = self._one.count("ssm.time_step_rank")
        return self._error(f"{info.name} has {count} {what}, which are not of {heads} value heads")


def _names(name: str, table: Names, prefix: str = "") -> tuple[str, ...]:
    stem, _, end = name.rpartition(".")
    found = table.get(name) or table.get(stem, ())
    suffix = "" if name in table else f".{end}"
    return tuple(f"{prefix}{one}{suffix}" for one in ((found,) if isinstance(found, str) else found))


def in_runs(weight: Tensor, order: Tensor) -> Tensor:
    return weight.view(len(weight), len(order), -1)[:, order].flatten(1)


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
