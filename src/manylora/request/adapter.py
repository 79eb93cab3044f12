"""LoraInput and LoraMix: the adapters of a request, as they came."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from manylora.errors import RequestError
from manylora.request.rules import require

MAX_MIXED = 8  # adapters of one request
MAX_SCALE = 100.0  # of an adapter, or less than its negative
INVOCATION = "invocation"  # name of a LoraExtra
MAX_INVOCATION = 4096  # tokens of it


@dataclass(frozen=True, eq=False)
class LoraExtra:
    """A part of an adapter that has no row in the tensor form: a bias, a norm, something of the embedding or
    the head.

    name: as `manylora.lora.extras` lists them.
    values: [n] or [rows, columns], of the types of `LoraInput.weights`, the scaling in them.
    token_ids: of a matrix that has rows for these tokens only; ascending.
    """

    name: str
    values: np.ndarray
    token_ids: tuple[int, ...] = ()

    @classmethod
    def invocation(cls, token_ids: Iterable[int]) -> LoraExtra:
        """Of an activated LoRA, which acts from the last of these sequences in the prompt on; no values."""
        return cls(INVOCATION, np.empty(0, np.float32), tuple(token_ids))


@dataclass(frozen=True, eq=False)
class LoraInput:
    """The adapter part of a request, as it came.

    task_id: unsigned 64-bit identity the client uses for this adapter.
    weights: [1, rows, W], float32, float16, 2-byte void ("V2", the bits of bfloat16) or 1-byte void ("V1", of
             float8_e4m3fn, which comes from files and crosses no wire); None when cached.
    config:  [1, rows, 3 or 4] int32, columns module id, layer, rank[, is_dora]; None when cached.
    name:    of an adapter in the server's catalog, in place of all of these.
    source:  what kind of checkpoint `name` must be, "hf" or "nemo"; None: whatever it is.
    extras:  parts of the adapter beside its tensors; they come from files, and only INVOCATION crosses wires.
    checked: the adapter that the engine's own store made of these tensors before, or of files: then nothing
             is checked and digested again.
    scales:  [rows] float32, what each row's B A is multiplied by, of float8_e4m3fn weights; None: 1.
    version: which one of its name this content is, where the caller counts them; 0: the engine does.
    follow:  go on with newer versions of the name, from one step to the next.
    Shapes and contents are checked by `manylora.lora.tensors`, not here.
    """

    task_id: int | None
    weights: np.ndarray | None = None
    config: np.ndarray | None = None
    name: str | None = None
    source: str | None = None
    extras: tuple[LoraExtra, ...] = ()
    checked: object | None = None
    scales: np.ndarray | None = None
    version: int = 0
    follow: bool = False

    @property
    def label(self) -> str:
        """What versions are counted under: the name, else the id."""
        return str(self.task_id) if self.name is None else self.name

    def without_tensors(self) -> LoraInput:
        """The same adapter, by what identifies it."""
        bare = {"weights": None, "config": None, "extras": (), "checked": None, "scales": None}
        return replace(self, **bare) if self.has_tensors else self  # type: ignore[arg-type]

    @property
    def invocation(self) -> tuple[int, ...]:
        """Tokens from which on an activated LoRA acts; none: the adapter acts everywhere."""
        return next((extra.token_ids for extra in self.extras if extra.name == INVOCATION), ())

    @property
    def has_tensors(self) -> bool:
        """True when the request brought tensors (possibly only one of the two, which is an error later), or
        what was made of them."""
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
    """Several adapters that act together, or one with a scale. Made by `mix`.

    members: each with what its B A is multiplied by; of float32, and neither 0 nor, of one alone, 1.
    """

    members: tuple[tuple[LoraInput, float], ...]

    @property
    def task_ids(self) -> list[int]:
        return [number for lora, _ in self.members for number in lora.task_ids]

    @property
    def has_tensors(self) -> bool:
        """Whether any has."""
        return any(lora.has_tensors for lora, _ in self.members)

    def without_tensors(self) -> LoraMix:
        """The same adapters, by what identifies them."""
        return self.map(LoraInput.without_tensors)

    def map(self, change: Callable[[LoraInput], LoraInput]) -> LoraMix:
        """The same with other members in place of these."""
        return LoraMix(tuple((change(lora), scale) for lora, scale in self.members))


@dataclass(frozen=True)
class AdapterVersion:
    """The content of an adapter that made the output tokens from `start` on, up to the next version's.

    name: as in `LoraInput.label`. number: counts the contents that the name has had, from 1.
    """

    name: str
    number: int
    digest: str
    start: int = 0


def mix(members: Sequence[tuple[LoraInput, float]], field: str = "lora") -> LoraInput | LoraMix | None:
    """What a request asks for that names these adapters with these scales; None: the base model.

    An adapter that is named twice has the sum of its scales, as with PEFT, and with 0 takes no part.
    field: which names them. Raises RequestError.
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
    """In float32, as kernels have it."""
    ok = isfinite(value) and abs(value) <= MAX_SCALE
    require(ok, field, f"must have scales that are finite, of at most {MAX_SCALE:g} up or down", value)
    return float(np.float32(value))
