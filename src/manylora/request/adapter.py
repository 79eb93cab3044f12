"""LoraInput and LoraMix: the adapters of a request, as received."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from manylora.errors import RequestError
from manylora.request.sampling import require

MAX_MIXED = 8  # adapters of one request
MAX_SCALE = 100.0  # largest magnitude of an adapter's scale
INVOCATION = "invocation"  # name of a LoraExtra
MAX_INVOCATION = 4096  # maximum number of its tokens


@dataclass(frozen=True, eq=False)
class LoraExtra:
    """A part of an adapter without a row in the tensor form: a bias, a norm, or a part of the embedding or
    the head.

    name: one of those listed in `manylora.lora.extras`.
    values: [n] or [rows, columns], in the types of `LoraInput.weights`, with the scaling folded in.
    token_ids: for a matrix with rows for these tokens only; ascending.
    """

    name: str
    values: np.ndarray
    token_ids: tuple[int, ...] = ()

    @classmethod
    def invocation(cls, token_ids: Iterable[int]) -> LoraExtra:
        """For an activated LoRA: it acts from the last of these sequences in the prompt on. Has no values."""
        return cls(INVOCATION, np.empty(0, np.float32), tuple(token_ids))


class CheckedAdapter:
    """Base of the adapters of `manylora.lora.tensors`, whose contents were validated and digested."""

    digest: str


@dataclass(frozen=True, eq=False)
class LoraInput:
    """The adapter part of a request, as received.

    task_id: unsigned 64-bit id that the client uses for this adapter.
    weights: [1, rows, W], float32, float16, 2-byte void ("V2", the bits of bfloat16) or 1-byte void ("V1", of
             float8_e4m3fn, which only comes from files); None if cached.
    config:  [1, rows, 3 or 4] int32, columns module id, layer, rank[, is_dora]; None if cached.
    name:    of an adapter in the server's catalog, used instead of all of these.
    source:  required kind of checkpoint of `name`, "hf" or "nemo"; None: any.
    extras:  parts of the adapter besides its tensors. They come from files; only INVOCATION is sent by
    clients.
    checked: the adapter that was made from these tensors or from files earlier: nothing is validated and
             digested again.
    scales:  [rows] float32, factor on each row's B A, for float8_e4m3fn weights; None: 1.
    version: number of this content among those of its name, if the caller counts them; 0: the engine counts.
    follow:  switch to newer versions of the name, from one step to the next.
    Shapes and contents are checked by `manylora.lora.tensors`, not here.
    """

    task_id: int | None
    weights: np.ndarray | None = None
    config: np.ndarray | None = None
    name: str | None = None
    source: str | None = None
    extras: tuple[LoraExtra, ...] = ()
    checked: CheckedAdapter | None = None
    scales: np.ndarray | None = None
    version: int = 0
    follow: bool = False

    @property
    def label(self) -> str:
        """The key under which versions are counted: the name, or else the id."""
        return str(self.task_id) if self.name is None else self.name

    def without_tensors(self) -> LoraInput:
        """The same adapter with only its identity."""
        bare = {"weights": None, "config": None, "extras": (), "checked": None, "scales": None}
        return replace(self, **bare) if self.has_tensors else self  # type: ignore[arg-type]

    @property
    def invocation(self) -> tuple[int, ...]:
        """Tokens from which an activated LoRA acts. Empty: the adapter acts everywhere."""
        return next((extra.token_ids for extra in self.extras if extra.name == INVOCATION), ())

    @property
    def has_tensors(self) -> bool:
        """Whether the request brought tensors (possibly only one of the two, which is an error later), or an
        adapter made from them.
        """
        return self.weights is not None or self.config is not None or self.checked is not None

    @property
    def members(self) -> tuple[tuple[LoraInput, float], ...]:
        """As those of a mix."""
        return ((self, 1.0),)

    @property
    def task_ids(self) -> list[int]:
        return [] if self.task_id is None else [self.task_id]


@dataclass(frozen=True, eq=False)
class LoraMix:
    """Several adapters that act together, or one with a scale. Created by `mix`.

    members: each with the factor on its B A, rounded to float32. It is not 0, and for a single adapter not 1.
    """

    members: tuple[tuple[LoraInput, float], ...]

    @property
    def task_ids(self) -> list[int]:
        return [number for lora, _ in self.members for number in lora.task_ids]

    @property
    def has_tensors(self) -> bool:
        """Whether any member has tensors."""
        return any(lora.has_tensors for lora, _ in self.members)

    def without_tensors(self) -> LoraMix:
        """The same adapters with only their identity."""
        return self.map(LoraInput.without_tensors)

    def map(self, change: Callable[[LoraInput], LoraInput]) -> LoraMix:
        """The same with each member replaced by `change` of it."""
        return LoraMix(tuple((change(lora), scale) for lora, scale in self.members))


@dataclass(frozen=True)
class AdapterVersion:
    """The content of an adapter that generated the output tokens from `start` on, up to the next version's.

    name: as in `LoraInput.label`. number: counts the contents of the name, from 1.
    """

    name: str
    number: int
    digest: str
    start: int = 0


def mix(members: Sequence[tuple[LoraInput, float]], field: str = "lora") -> LoraInput | LoraMix | None:
    """The adapter part for these adapters and scales. None: the base model.

    If an adapter is named twice, its scales add up, as in PEFT. An adapter with scale 0 is dropped. field:
    the field that names them. Raises RequestError.
    """
    require(len(members) <= MAX_MIXED, field, f"must name at most {MAX_MIXED} adapters", len(members))
    sums: dict[object, tuple[LoraInput, float]] = {}
    for lora, scale in members:
        key = lora.name if lora.task_id is None else lora.task_id
        known, sofar = sums.get(key, (lora, 0.0))
        sums[key] = known, sofar + _scale(scale, field)
    found = tuple((lora, _scale(total, field)) for lora, total in sums.values() if total)
    if len(found) == 1 and found[0][1] == 1:
        return found[0][0]
    if any(lora.follow for lora, _ in found):
        raise RequestError("lora_version follow is for one adapter with a scale of 1: use keep")
    return LoraMix(found) if found else None


def _scale(value: float, field: str) -> float:
    """Rounded to float32, as used by kernels."""
    ok = isfinite(value) and abs(value) <= MAX_SCALE
    require(ok, field, f"must have scales that are finite, of at most {MAX_SCALE:g} up or down", value)
    return float(np.float32(value))
