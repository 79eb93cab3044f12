"""AdapterReader: a folder or file to checked tensors, with what they are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from manylora.config import LoraCacheConfig, ModelConfig
from manylora.errors import AdapterInvalidError
from manylora.lora.extras import check_extras
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import lora_modules
from manylora.lora.tensors import adapter_from_tensors, is_bfloat16
from manylora.request import LoraExtra

__all__ = ["AdapterReader", "ReadAdapter"]


@dataclass(frozen=True, eq=False)
class ReadAdapter:
    """digest: of the content. kind: peft, nemo, npy, llgtrt."""

    digest: str
    kind: str
    dtype: str
    max_rank: int
    weights: np.ndarray
    config: np.ndarray
    extras: tuple[LoraExtra, ...] = ()

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
    """Reads for one base model. Any thread. half: the engine computes in float16."""

    def __init__(self, model_dir: Path, model: ModelConfig, lora: LoraCacheConfig, half: bool) -> None:
        self._model, self._half = model, half
        self._rank_limit = lora.rank_limit
        self._modules = lora_modules(model, lora.target_modules)
        self._base = BaseWeights(model_dir)

    def read(self, path: Path) -> ReadAdapter:
        """Raises AdapterInvalidError."""
        try:
            source = find_source(path)
            lora = read_lora(source, 0, modules=self._modules, base=self._base)
        except OSError as error:
            raise AdapterInvalidError(f"its files cannot be read: {error.strerror}") from error
        check_extras(lora.extras, self._model.num_layers)
        checked = adapter_from_tensors(
            lora, self._modules, self._model.num_layers, self._rank_limit, self._half
        )
        weights, config = lora.weights, lora.config
        assert weights is not None and config is not None
        dtype = "bfloat16" if is_bfloat16(weights.dtype) else weights.dtype.name
        rank = max((row.rank for row in checked.rows), default=0)
        return ReadAdapter(checked.digest, source.kind, dtype, rank, weights, config, lora.extras)
