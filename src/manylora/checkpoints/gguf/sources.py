"""Which parts of which tensors of a GGUF file make up each tensor of the checkpoint, and in which order."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manylora.checkpoints.gguf.blocks import PLAIN
from manylora.checkpoints.gguf.config import FACTORS, architecture_of
from manylora.checkpoints.gguf.container import Header, Metadata, TensorInfo
from manylora.checkpoints.gguf.names import Names
from manylora.errors import ConfigError

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


def read_targets(header: Header) -> dict[str, Target]:
    """By names in the checkpoint, or their own name if the architecture lacks them. Raises ConfigError."""
    return _Reader(header).targets()


class _Reader:
    def __init__(self, header: Header) -> None:
        self._header, self._own = header, architecture_of(header)
        self._one = Metadata(header, header.metadata["general.architecture"])

    def targets(self) -> dict[str, Target]:
        made: dict[str, Target] = {}
        joined: dict[str, dict[str, Source]] = {}
        for name, info in self._header.tensors.items():
            place = LAYER.fullmatch(name)
            if name in FACTORS.values() or (place and int(place[1]) >= self._one.layers):
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
