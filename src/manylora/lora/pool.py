"""AdapterPool: the bytes of both cache levels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manylora.errors import ConfigError
from manylora.kernels.spec import LoraRow
from manylora.lora.geometry import CacheGeometry, Layout, Placement
from manylora.lora.tensors import BFLOAT16, Adapter, AdapterRow, is_bfloat16

__all__ = ["AdapterPool"]


class AdapterPool:
    """Host level: [host_pages, page elements]; pinned memory beside a GPU. Device level: one flat tensor.

    A row is stored as A [rank, in], B transposed [rank, out], and the magnitude of a DoRA row.

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
        # Copies to a GPU are still under way when `load` returns: their source must not change before this.
        self._copied = torch.Event(device) if device.type == "cuda" else None

    @property
    def page_bytes(self) -> int:
        return self._geometry.page_elements * self.flat.dtype.itemsize

    def write_host(self, adapter: Adapter, layout: Layout, pages: Sequence[int]) -> None:
        """Convert an adapter to the compute dtype, into its pages on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        for row, place in zip(adapter.rows, layout.placements, strict=True):
            _turn_b(_tensor(row.payload), self._slots(pages, place)[: row.payload.size], place)

    def read_host(self, digest: str, layout: Layout, pages: Sequence[int]) -> Adapter:
        """The adapter in these pages, in the compute dtype; a copy."""
        rows = []
        for place in layout.placements:
            size = place.in_size + place.out_size + (place.out_size // place.rank if place.dora else 0)
            stored = self._slots(pages, place)[:size]
            payload = _array(_turn_b(stored, torch.empty_like(stored), place, back=True))
            rows.append(AdapterRow(place.module_id, place.layer, place.rank, place.dora, payload))
        return Adapter(digest, tuple(rows))

    def load(self, layout: Layout, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        """Copy an adapter host to device: the slots in use, not whole pages."""
        for source, target, slots in zip(host_pages, device_pages, layout.used_slots, strict=True):
            used = slots * self._geometry.page_width
            self._device_pages[target, :used].copy_(self._host[source, :used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def rows(self, layout: Layout, pages: Sequence[int]) -> dict[tuple[int, int], LoraRow]:
        """Where each (layer, module id) of an adapter on these device pages lies in `flat`."""
        geometry = self._geometry
        return {
            (place.layer, place.module_id): LoraRow(
                pages[place.page] * geometry.page_elements + place.slot * geometry.page_width,
                place.rank,
                place.dora,
            )
            for place in layout.placements
        }

    def _slots(self, pages: Sequence[int], place: Placement) -> Tensor:
        return self._host[pages[place.page], place.slot * self._geometry.page_width :]


def _turn_b(source: Tensor, target: Tensor, place: Placement, back: bool = False) -> Tensor:
    """Copy a row, with B [out, rank] of the tensor format as [rank, out], or back. Returns the target.

    Kernels read B by the rank: one coefficient, one run of memory.
    """
    a_end, b_end = place.in_size, place.in_size + place.out_size
    out = place.out_size // place.rank
    shape = (place.rank, out) if back else (out, place.rank)
    target[:a_end].copy_(source[:a_end])
    target[a_end:b_end].view(shape[::-1]).copy_(source[a_end:b_end].view(shape).T)
    target[b_end:].copy_(source[b_end:])
    return target


def _tensor(payload: np.ndarray) -> Tensor:
    payload = np.ascontiguousarray(payload)
    if is_bfloat16(payload.dtype):
        return torch.from_numpy(payload.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(payload if payload.flags.writeable else payload.copy())


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(BFLOAT16)
    return tensor.numpy().copy()
