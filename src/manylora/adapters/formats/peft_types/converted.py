"""The input and output of converters: an adapter as PEFT saved it, and the same adapter as a LoRA. What is
wrong raises AdapterInvalidError."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from manylora.adapters.formats.base_weights import BaseReader
from manylora.adapters.formats.peft.names import EXPERT_KEY, LORA_NAMES, module_of
from manylora.adapters.formats.peft.settings import CONFIG, PeftConfig, config_of, form_of, peft_type
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.tensor_files import RawTensor, decode
from manylora.adapters.modules import LoraModule
from manylora.errors import AdapterInvalidError
from manylora.request import LoraExtra

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PeftFiles:
    """An adapter as PEFT saved it. settings: adapter_config.json. tensors: by PEFT's names. base: an open
    base model; None: not known."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]
    options: ReadOptions
    base: BaseReader | None


@dataclass(frozen=True)
class LoraForm:
    """The same adapter as a LoRA.

    tensors: by PEFT's names for a LoRA, with biases, norms and tables. extras: parts that have no such name.
    vectors: by the name of lora_A, for modules that share A and B: b [out] and d [rank]. The module's change
    is then diag(b) B diag(d) A.
    """

    config: PeftConfig
    tensors: Mapping[str, RawTensor]
    extras: list[LoraExtra] = field(default_factory=list)
    vectors: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


# What a kind's settings say in LoRA's words too.
COMMON = ("modules_to_save", "base_model_name_or_path", "fan_in_fan_out")
COUNTS = range(1, 2**31), "a positive number"
INTEGERS = {"U8": "<u1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
Matrices = tuple[np.ndarray, np.ndarray]
"""A [rank, in] and B [out, rank]."""


class Pairs:
    """Reads an adapter's tensors and collects A and B of each module, with the scaling in B.

    parts: last parts of the names of this type's tensors. Other tensors, such as biases, are kept unchanged.
    """

    def __init__(self, files: PeftFiles, parts: Collection[str]) -> None:
        self.files = files
        self.kind = peft_type(files.settings)
        self._found: dict[str, dict[str, RawTensor]] = {}
        self._made: dict[str, RawTensor] = {}
        self._rest: dict[str, RawTensor] = {}
        self._vectors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._common: dict[tuple[int, int], tuple[RawTensor, RawTensor]] = {}  # A and B, by their sizes
        self._reserved: tuple[tuple[int, int], tuple[int, int]] | None = None
        self._elements = 0
        for key, tensor in files.tensors.items():
            path, _, part = key.removesuffix(".weight").rpartition(".")
            if part in parts:
                files.options.bounds.check_elements(math.prod(tensor.shape))
                self._found.setdefault(path, {})[part] = tensor
            else:
                self._rest[key] = tensor

    def paths(self, *parts: str) -> Iterator[str]:
        """The paths of modules that have any of these parts, sorted."""
        return (path for path in sorted(self._found) if not self._found[path].keys().isdisjoint(parts))

    def has(self, path: str, part: str) -> bool:
        return part in self._found.get(path, {})

    def shape(self, path: str, part: str, dims: int = 2) -> tuple[int, ...]:
        """The shape of a tensor, which must have `dims` dimensions, none of them 0."""
        shape = self._tensor(path, part).shape
        if len(shape) != dims or 0 in shape:
            raise AdapterInvalidError(f"{path}.{part} has shape {shape}, {dims} dimensions are expected")
        return shape

    def sizes(self, path: str, letters: str, **shapes: str) -> list[int]:
        """The sizes of a module that these letters stand for. shapes: of its tensors, such as "r i": the same
        letter is the same size in all of them, a digit is itself."""
        found: dict[str, int] = {}
        for part, names in shapes.items():
            for name, size in zip(names.split(), self.shape(path, part, len(names.split())), strict=True):
                if found.setdefault(name, int(name) if name.isdigit() else size) != size:
                    raise unfit(path)
        return [found[letter] for letter in letters.split()]

    def read(self, path: str, part: str) -> np.ndarray:
        """The values in float32."""
        return decode(f"{path}.{part}", self._tensor(path, part))

    def integers(self, path: str, part: str, below: int) -> np.ndarray:
        """The values in int64, which must be from 0 to below - 1."""
        tensor = self._tensor(path, part)
        if tensor.dtype not in INTEGERS:
            raise AdapterInvalidError(f"{path}.{part} must hold integers, got {tensor.dtype}")
        values = np.frombuffer(tensor.data, INTEGERS[tensor.dtype]).astype(np.int64).reshape(tensor.shape)
        if values.size and not (values.min() >= 0 and values.max() < below):
            raise AdapterInvalidError(f"{path}.{part} must hold numbers from 0 to {below - 1}")
        return values

    def _tensor(self, path: str, part: str) -> RawTensor:
        if not self.has(path, part):
            raise AdapterInvalidError(f"{path} is missing its {part}")
        return self._found[path][part]

    def module(self, path: str) -> LoraModule | None:
        """The model's module at this path; None: not known."""
        return module_of(path, self.files.options.modules)

    def known_module(self, path: str) -> LoraModule:
        """The same, for a module whose tensors do not show its number of inputs."""
        module = self.module(path)
        if module is None:
            raise AdapterInvalidError(
                f"{path}: how many inputs it has depends on the base model, which is not known here or has "
                "no such module: name its directory with --base"
            )
        return module

    def base_weight(self, path: str, in_dim: int, out_dim: int) -> Tensor:
        """The base's weight [out, in] in float32."""
        if self.files.base is None:
            raise AdapterInvalidError(
                f"{CONFIG} describes {form_of(self.files.settings)}: its change is computed from the base's "
                "weights, which are not known here: name their directory with --base"
            )
        return self.files.base.weight(path, in_dim, out_dim, self.is_transposed(path))

    def is_transposed(self, path: str) -> bool:
        """Whether the base's weight is stored as [in, out]."""
        module = self.module(path)
        return bool(self.files.settings.get("fan_in_fan_out")) if module is None else module.transposed

    def reserve(self, path: str, rank: int, in_dim: int, out_dim: int) -> None:
        """Refuse a module that is too large, before its A [rank, in] and B [out, rank] are computed, which
        must have these sizes."""
        self._check(path, rank, rank * (in_dim + out_dim))
        self._reserved = (rank, in_dim), (out_dim, rank)

    def convert(self, paths: Iterable[str], make: Callable[[str], Matrices]) -> LoraForm:
        """The adapter as a LoRA. make: returns A and B of the module at a path, after `reserve`. One of rank
        0 is left out."""
        for path in paths:
            try:
                a, b = make(path)
            except (ValueError, RuntimeError, IndexError) as error:  # shapes that no reader has looked at
                raise unfit(path) from error
            if (a.shape, b.shape) != self._reserved:
                raise unfit(path)
            if len(a):
                self._keep(path, RawTensor.of(a), RawTensor.of(b))
        return self.form()

    def add_shared(self, path: str, a: np.ndarray, b: np.ndarray, of_b: np.ndarray, of_d: np.ndarray) -> None:
        """Add a module with the change diag(of_b) b diag(of_d) a. a [rank, in] and b [out, rank] are slices
        of matrices that all modules share, so those of equal size are equal."""
        (rank, in_dim), out_dim = a.shape, len(b)
        key = f"{path}.lora_A.weight"
        name = LORA_NAMES.find(key)
        in_stack = name is not None and name.stack is not None
        if not self.files.options.shared or EXPERT_KEY.fullmatch(key) or in_stack:
            self._check(path, rank, rank * (in_dim + out_dim))
            self._keep(path, RawTensor.of(a * of_d[:, None]), RawTensor.of(b * of_b[:, None]))
            return
        self._check(path, rank, rank + out_dim)
        if (in_dim, out_dim) not in self._common:
            self._check(path, rank, rank * (in_dim + out_dim))
            self._common[in_dim, out_dim] = RawTensor.of(a), RawTensor.of(b)
        self._keep(path, *self._common[in_dim, out_dim])
        self._vectors[key] = of_b, of_d

    def _keep(self, path: str, a: RawTensor, b: RawTensor) -> None:
        self._made |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}

    def _check(self, path: str, rank: int, numbers: int) -> None:
        """numbers: elements that the module adds."""
        bounds = self.files.options.bounds
        if rank > bounds.rank:
            raise AdapterInvalidError(
                f"Invalid low_rank ({rank}): {path} of this {self.kind} has that rank as low-rank rows, "
                f"{numbers} numbers; the largest served is {bounds.rank} (max_lora_rank, "
                "lora_cache_max_adapter_size)"
            )
        self._elements += numbers
        bounds.check_elements(self._elements)

    def check_rank(self, path: str, found: int) -> None:
        """found: the module's rank by its tensors. Refuses other settings."""
        self._ranks.check_rank(path, found)

    def check_count(self, path: str, name: str, found: int) -> None:
        """found: a size by the tensors. Refuses another one in the setting `name`."""
        told = self.files.settings.get(name)
        if told is not None and told != found:
            raise AdapterInvalidError(f"{path} has {found} for {name}, and {CONFIG} says {str(told)[:40]}")

    def alpha_over_rank(self, path: str, rank: int | None) -> np.float32:
        """alpha / r by the patterns of the settings. rank: of the module's matrices; None: they do not show
        it."""
        if rank is not None:
            self._alphas.check_rank(path, rank)
        return np.float32(self._alphas.scale(path, self._alphas.rank(path)))

    @cached_property
    def _alphas(self) -> PeftConfig:
        settings, names = self.files.settings, ("rank_pattern", "alpha_pattern")
        patterns = {name: settings[name] for name in names if name in settings}
        return config_of({"lora_alpha": self.number("alpha", 8), "r": settings.get("r", 8), **patterns})

    @cached_property
    def _ranks(self) -> PeftConfig:
        found = {name: self.files.settings.get(name) for name in ("r", "rank_pattern")}
        return config_of({"lora_alpha": 1, **found})

    def form(self) -> LoraForm:
        """The adapter as a LoRA."""
        settings = {name: self.files.settings[name] for name in COMMON if name in self.files.settings}
        config = replace(config_of({"lora_alpha": 1, **settings}), folded=True)
        return LoraForm(config, {**self._made, **self._rest}, vectors=self._vectors)

    def number(self, name: str, default: float) -> float:
        """A setting that is a number."""
        value = self.files.settings.get(name)
        return default if value is None else value


def integer(settings: Mapping[str, Any], name: str, default: int, values: range, what: str) -> int:
    """A setting that must be one of these integers. what: these, in words."""
    value = settings.get(name, default)
    if type(value) is not int or value not in values:
        raise AdapterInvalidError(f"{CONFIG}: {name} must be {what}")
    return value


def unfit(path: str, parts: str = "its tensors") -> AdapterInvalidError:
    return AdapterInvalidError(f"{path}: {parts} do not fit together")


def by_module(
    make: Callable[[Pairs, str], Matrices], *parts: str, beside: Collection[str] = ()
) -> Callable[[PeftFiles], LoraForm]:
    """The reader of a type whose modules are converted one by one. make: returns A and B of the module at a
    path. parts: tensors that identify such a module. beside: further tensors that it may have."""

    def read(files: PeftFiles) -> LoraForm:
        pairs = Pairs(files, (*parts, *beside))
        return pairs.convert(pairs.paths(*parts), partial(make, pairs))

    return read
