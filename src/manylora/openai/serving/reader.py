"""AdapterReader: a folder or file to checked tensors, with what they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.bounds import ANY_MODEL, Bounds
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import LoraModule
from manylora.lora.tensors import Adapter, type_name
from manylora.request import LoraExtra, LoraInput

__all__ = ["AdapterReader", "ReadAdapter"]


@dataclass(frozen=True, eq=False)
class ReadAdapter:
    """digest: of the content. kind: peft, nemo, npy, llgtrt. checked: views of weights, for an engine of the
    same model in this process; None of a copy, which is checked when it is used. scales: as LoraInput's."""

    digest: str
    kind: str
    dtype: str
    max_rank: int
    weights: np.ndarray
    config: np.ndarray
    extras: tuple[LoraExtra, ...] = ()
    checked: Adapter | None = None
    scales: np.ndarray | None = None

    @property
    def task_id(self) -> int:
        """From the digest, so it is the same in every process and means the same for ever. The highest bit
        keeps clear of the small numbers that clients of other servers choose."""
        digest = hashlib.blake2b(self.digest.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") | 2**63

    @property
    def num_bytes(self) -> int:
        return self.weights.nbytes + self.config.nbytes + sum(one.values.nbytes for one in self.extras)


class AdapterReader:
    """Reads for one base model. Any thread.

    modules: of the base, by id. verify: tensors to what the engine would take; raises AdapterInvalidError.
    bounds: of the engine's adapters. float8: whether the way to the engine knows 8-bit floats; else they are
    widened.
    """

    def __init__(
        self,
        base: BaseWeights,
        modules: Mapping[int, LoraModule],
        verify: Callable[[LoraInput], Adapter],
        float8: bool = True,
        bounds: Bounds = ANY_MODEL,
    ) -> None:
        self._base, self._modules, self._verify = base, modules, verify
        self._bounds, self._float8 = bounds, float8

    def read(self, path: Path, roots: Sequence[Path] | None = None) -> ReadAdapter:
        """roots: folders that its files must lie in; None: anywhere. Raises AdapterInvalidError."""
        bounds = self._bounds.within(roots)
        try:
            source = find_source(path)
            lora = read_lora(
                source, 0, modules=self._modules, base=self._base, float8=self._float8, bounds=bounds
            )
        except OSError as error:
            raise AdapterInvalidError(f"its files cannot be read: {error.strerror}") from error
        checked = self._verify(lora)
        weights, config = lora.weights, lora.config
        assert weights is not None and config is not None
        dtype = type_name(weights)
        rank = max((row.format.rank for row in checked.rows), default=0)
        about = checked.digest, source.kind, dtype, rank
        return ReadAdapter(*about, weights, config, lora.extras, checked, lora.scales)
