"""AdapterPool: the bytes of both cache levels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manylora.errors import ConfigError
from manylora.kernels.spec import LoraRow
from manylora.lora.geometry import CacheGeometry, Placement
from manylora.lora.tensors import Adapter, is_bfloat16

__all__ = ["AdapterPool"]


class AdapterPool:
    """Host level: [host_pages, page elements]; pinned memory beside a GPU. Device level: one flat tensor.

    Memory that was never written is not resident yet, so an empty cache on a CPU costs nothing.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        host_pages: int,
        device_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._geometry = geometry
        size = geometry.page_elements
        try:
            self._host = torch.empty((host_pages, size), dtype=dtype, pin_memory=device.type == "cuda")
            self.flat = torch.empty(device_pages * size, dtype=dtype, device=device)
        except RuntimeError as error:
            raise ConfigError(
                f"the LoRA cache of {host_pages} host and {device_pages} device pages of "
                f"{size * dtype.itemsize} bytes cannot be allocated; lower lora_cache_host_memory_bytes or "
                "lora_cache_gpu_memory_fraction"
            ) from error
        self._device_pages = self.flat.view(device_pages, size)

    @property
    def page_bytes(self) -> int:
        return self._geometry.page_elements * self.flat.dtype.itemsize

    def write_host(self, adapter: Adapter, placements: Sequence[Placement], pages: Sequence[int]) -> None:
        """Convert an adapter to the compute dtype, into its pages on the host."""
        for row, place in zip(adapter.rows, placements, strict=True):
            start = place.slot * self._geometry.page_width
            self._host[pages[place.page], start : start + row.payload.size].copy_(_tensor(row.payload))

    def load(self, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        """Copy pages host to device."""
        for source, target in zip(host_pages, device_pages, strict=True):
            self._device_pages[target].copy_(self._host[source], non_blocking=True)

    def rows(
        self, adapter_rows: Sequence[tuple[Placement, bool]], pages: Sequence[int]
    ) -> dict[tuple[int, int], LoraRow]:
        """Where each (layer, module id) of an adapter on these device pages lies in `flat`."""
        geometry = self._geometry
        return {
            (place.layer, place.module_id): LoraRow(
                pages[place.page] * geometry.page_elements + place.slot * geometry.page_width,
                place.rank,
                dora,
            )
            for place, dora in adapter_rows
        }


def _tensor(payload: np.ndarray) -> Tensor:
    payload = np.ascontiguousarray(payload)
    if is_bfloat16(payload.dtype):
        return torch.from_numpy(payload.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(payload if payload.flags.writeable else payload.copy())
