"""AdapterSlicer: what one rank holds of each adapter."""

from __future__ import annotations

from collections.abc import Mapping as Dict

from manylora.config.engine import ModelConfig
from manylora.lora.file_adapter import FileAdapter
from manylora.lora.geometry import CacheGeometry, Layout
from manylora.lora.modules import LoraModule
from manylora.lora.tensors import Adapter
from manylora.parallel.mapping import Mapping


class AdapterSlicer:
    """model: the whole one. target_modules: as of LoraCacheConfig."""

    def __init__(self, model: ModelConfig, mapping: Mapping, target_modules: tuple[str, ...] = ()) -> None:
        raise NotImplementedError

    @property
    def modules(self) -> Dict[int, LoraModule]:
        """Of the rank, by id."""
        raise NotImplementedError

    def slice(self, adapter: Adapter | FileAdapter) -> Adapter:
        """This rank's rows and extras, layers numbered from the stage's first; the digest stays. Raises
        AdapterInvalidError."""
        raise NotImplementedError

    def layout(self, adapter: Adapter | FileAdapter, geometry: CacheGeometry, element_bytes: int) -> Layout:
        """Of this rank's part, with as many pages on every rank."""
        raise NotImplementedError
