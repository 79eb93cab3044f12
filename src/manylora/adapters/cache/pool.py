"""AdapterPool: the memory of both cache levels. LoadedAdapter, lora_batch: what forward passes read of it.
StoreParts: the components of an AdapterStore, sized for one model and device.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from manylora.adapters.bounds import Bounds
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.geometry import (
    CacheGeometry,
    CachePlan,
    ExtraPiece,
    Layout,
    Placement,
    is_virtual,
    pages_of_rank,
    plan_cache,
)
from manylora.adapters.modules import beside_experts, lora_modules
from manylora.adapters.number_types import BFLOAT16, NUMBER_TYPES, is_bfloat16
from manylora.adapters.pages import PagePart, SharedPages
from manylora.adapters.rules import AdapterRules
from manylora.adapters.slicing import Slicer
from manylora.adapters.tensors import (
    Adapter,
    AdapterRow,
    FileAdapter,
    SharedMatrices,
    find_shared,
    restore,
)
from manylora.config.engine import LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.kernels import native
from manylora.kernels.device import CopyStream, host_tensor
from manylora.kernels.loading import FILE_ROW, can_lay_out, lay_out, read_rows
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.kernels.spec import Extra, ExtraSegment, LoraBatch, LoraRow, LoraSegment
from manylora.kernels.transfer import HUGE_BYTES, upload
from manylora.request import LoraExtra

logger = logging.getLogger("manylora")

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes per element
ENCODED = {one.encoding: one.dtype for one in NUMBER_TYPES}  # encodings other than PLAIN
PIECE_BYTES = 2**22  # of a copy to the device: a step's tables can be copied between two pieces
PARALLEL_BYTES = 2**23  # adapters from this size on are laid out by several threads
THREADS = 4
MAX_MIXES = 256  # tables of mixes that are kept

SharedOf = Mapping[str, SharedPages]  # locations of matrices that rows share, by key
NOTHING_SHARED: SharedOf = {}
Pages = TypeVar("Pages")


class AdapterPool:
    """Host level: [host_pages, page elements], page-locked if there is a GPU. Device level: one flat tensor.

    A CPU computes from the host level's memory. Its device level only limits the number of pages in use and
    has no memory of its own.

    A row is stored as A [rank, in], B transposed [rank, out], and the magnitude of a DoRA row. A row of a
    routed-expert module has such a pair for each expert, one after the other. 8-bit numbers are stored
    unchanged, several of them per page element.

    Memory that was never written is not resident, so an empty cache on a CPU uses no memory for its pages.

    dtype_name: the pages' dtype, by torch's name.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        host_pages: int,
        device_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        self.element_bytes, size = dtype.itemsize, geometry.page_elements
        self.page_bytes, self.dtype_name = size * dtype.itemsize, str(dtype).removeprefix("torch.")
        try:
            self._host = host_tensor((host_pages, size), dtype, device)
            self._shared = device.type == "cpu"
            self.flat = self._host.view(-1)
            if not self._shared:
                self.flat = torch.empty(device_pages * size, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"the LoRA cache of {host_pages} host and {device_pages} device pages of "
                f"{self.page_bytes} bytes cannot be allocated; lower lora_cache_host_memory_bytes or "
                "lora_cache_gpu_memory_fraction"
            ) from error
        self._device_pages = self.flat.view(-1, size)
        self._copies = CopyStream(device)

    def write_host(self, adapter: Adapter | FileAdapter, layout: Layout, pages: Sequence[int]) -> None:
        """Convert an adapter to the pages' dtype and write it to its host pages. Raises AdapterChangedError
        if it is read from its file now and the file has changed.
        """
        self._copies.finish()  # these pages may still be the source of a copy
        if isinstance(adapter, FileAdapter):
            self._read_file(adapter, layout, pages)
            return
        rows = list(zip(adapter.rows, layout.placements, strict=True))
        for kind in {row.payload.dtype for row in adapter.rows}:
            self._write_rows([(row, place) for row, place in rows if row.payload.dtype == kind], kind, pages)
        for extra, where in zip(adapter.extras, layout.extras, strict=True):
            if not where.pieces:  # an extra without values
                continue
            sizes = [piece.rows * where.columns for piece in where.pieces]
            parts = np.split(extra.values.reshape(-1), np.cumsum(sizes)[:-1])
            for piece, part in zip(where.pieces, parts, strict=True):
                self._slots(pages, piece)[: part.size].copy_(_tensor(part))

    def _read_file(self, adapter: FileAdapter, layout: Layout, pages: Sequence[int]) -> None:
        stored, places = adapter.stored, layout.placements
        table = np.empty(len(places), FILE_ROW)
        for name in ("a", "b", "rank", "scale"):
            table[name] = stored.table[name]
        table["in"] = [place.in_size // place.format.rank for place in places]
        table["out"] = [place.out_size // place.format.rank for place in places]
        start, size = self._host.data_ptr(), self._host.itemsize
        table["target"] = [start + size * self._offset(pages, place) for place in places]
        large = size * sum(place.in_size + place.out_size for place in places) >= PARALLEL_BYTES
        threads = min(THREADS, os.cpu_count() or 1) if large else 1
        with adapter.open() as descriptor:
            if not read_rows(descriptor, table, self.dtype_name, stored.dtype, threads):
                raise AdapterInvalidError(f"{stored.file} was cut short, or holds a NaN or an infinity")

    def _offset(self, pages: Sequence[int], place: Placement | ExtraPiece) -> int:
        geometry, page = self.geometry, pages[place.page]
        return page * geometry.page_elements + (_first_slot(page) + place.slot) * geometry.page_width

    def _write_rows(
        self, rows: Sequence[tuple[AdapterRow, Placement]], kind: np.dtype, pages: Sequence[int]
    ) -> None:
        target = self.dtype_name
        source = "bfloat16" if is_bfloat16(kind) else kind.name
        if not can_lay_out(target, source):
            for row, place in rows:
                _turn_b(_tensor(row.payload), self._slots(pages, place)[: row.payload.size], place)
            return
        start, size = self._host.data_ptr(), self._host.itemsize
        payloads = [np.ascontiguousarray(row.payload) for row, _ in rows]
        table = []
        for payload, (_, place) in zip(payloads, rows, strict=True):
            if payload.size != place.size:
                raise ValueError(f"a row of {payload.size} values for {place}")
            rank, each = place.format.rank, place.experts * place.format.rank
            more = place.size - place.in_size - place.out_size
            sizes = place.experts, rank, place.in_size // each, place.out_size // each, more
            offset = self._offset(pages, place)
            table.append((payload.ctypes.data, start + offset * size, *sizes))
        large = sum(payload.nbytes for payload in payloads) >= PARALLEL_BYTES
        lay_out(table, target, source, min(THREADS, os.cpu_count() or 1) if large else 1)

    def pieces(self, page: int) -> Sequence[Tensor]:
        """A host page in parts that are quick to allocate. Empty beside a GPU: memory is allocated there."""
        return self._host[page].split(HUGE_BYTES // self.element_bytes) if self._shared else ()

    def write_shared(self, matrices: SharedMatrices, layout: Layout, pages: Sequence[int]) -> None:
        """As `write_host`, for matrices that rows share."""
        row = AdapterRow(0, 0, RowFormat(matrices.rank), matrices.values)
        self.write_host(Adapter("", (row,)), layout, pages)

    def read_host(
        self, digest: str, layout: Layout, pages: Sequence[int], shared: SharedOf = NOTHING_SHARED
    ) -> Adapter:
        """A copy of the adapter in these pages, in their dtype. shared: the pages of its shared matrices."""
        matrices, rows = {}, []
        for key, one in layout.shared.items():
            known = find_shared(key)
            if known is None:
                [row] = self.read_host("", one, shared[key].pages).rows
                known = restore(
                    key, row.format.rank, one.placements[0].in_size // row.format.rank, row.payload
                )
            matrices[key] = known
        for place in layout.placements:
            stored = self._slots(pages, place)[: place.size]
            payload = _array(_turn_b(stored, torch.empty_like(stored), place, back=True))
            if place.format.encoding is not Encoding.PLAIN:
                payload = payload.view(ENCODED[place.format.encoding])
            common = matrices.get(place.key)
            rows.append(AdapterRow(place.module_id, place.layer, place.format, payload, shared=common))
        extras = []
        for where in layout.extras:
            parts = [self._slots(pages, piece)[: piece.rows * where.columns] for piece in where.pieces]
            values = _array(torch.cat(parts)) if parts else np.empty(0, np.float32)
            shaped = values.reshape(-1, where.columns) if parts and where.is_matrix else values
            extras.append(LoraExtra(where.name, shaped, where.token_ids))
        return Adapter(digest, tuple(rows), tuple(extras))

    def load(
        self, layout: Layout, host_pages: Sequence[int], device_pages: Sequence[int]
    ) -> torch.Event | None:
        """Start to copy the used slots of an adapter from host to device. None: nothing to copy."""
        if self._shared:
            return None
        piece = PIECE_BYTES // self.element_bytes

        def copy() -> None:
            width = self.geometry.page_width
            for source, target, slots in zip(host_pages, device_pages, layout.used_slots, strict=True):
                start, first, size = _first_slot(target) * width, _first_slot(source) * width, slots * width
                to = self._device_pages[int(target), start : start + size].split(piece)
                for old, new in zip(
                    to, self._host[int(source), first : first + size].split(piece), strict=True
                ):
                    old.copy_(new, non_blocking=True)

        return self._copies.start(copy)

    def hold(self, event: torch.Event) -> None:
        """Make the next forward pass in the queue wait for a load."""
        self._copies.hold(event)

    def read_pages(self, host: Pages, device: Pages) -> Pages:
        """Which of an adapter's pages, or of its shared pages, are pages of `flat`."""
        return host if self._shared else device

    def loaded(
        self, layout: Layout, pages: Sequence[int], shared: SharedOf = NOTHING_SHARED
    ) -> LoadedAdapter:
        """The adapter with these pages of `flat`. shared: as in `read_host`."""
        rows, extras = {}, {}
        for place in layout.placements:
            offset, form = self._offset(pages, place), place.format
            row = LoraRow(offset * form.numbers_per_element(self.element_bytes), form)
            if place.key:  # its matrices are elsewhere, here are only its vectors
                matrices = layout.shared[place.key].placements[0]
                row = LoraRow(self._offset(shared[place.key].pages, matrices), form, (), offset)
            rows[place.layer, place.module_id] = row
        flat = self.flat
        for where in layout.extras:
            if not where.pieces:
                continue
            starts = [self._offset(pages, piece) for piece in where.pieces]
            views = tuple(
                flat[start : start + piece.rows * where.columns].view(piece.rows, where.columns)
                for start, piece in zip(starts, where.pieces, strict=True)
            )
            ids = upload(where.token_ids, torch.long, flat.device) if where.token_ids else None
            extras[where.name] = Extra(flat, views, upload(starts, torch.long, flat.device), ids)
        return LoadedAdapter(rows, extras)

    def _slots(self, pages: Sequence[int], place: Placement | ExtraPiece) -> Tensor:
        """From its first element to the end of the page. As bytes if the row has its own encoding."""
        page = pages[place.page]
        found = self._host[int(page), (_first_slot(page) + place.slot) * self.geometry.page_width :]
        encoded = isinstance(place, Placement) and place.format.encoding is not Encoding.PLAIN
        return found.view(torch.uint8) if encoded else found


def _first_slot(page: int) -> int:
    return page.slot if isinstance(page, PagePart) else 0


def _turn_b(source: Tensor, target: Tensor, place: Placement, back: bool = False) -> Tensor:
    """Copy a row from the tensor format's order to ours, or back. Returns the target.

    The tensor format has A [rank, in] of all experts, then B [out, rank] and the magnitude [out] of all. Our
    order keeps those of an expert together, so that they are found like any module's. B is stored as [rank,
    out], so that one coefficient applies to one run of memory.
    """
    if not place.in_size:  # only vectors
        return target.copy_(source)
    ours, theirs = (source, target) if back else (target, source)
    experts, sizes = (
        place.experts,
        (place.in_size, place.out_size, place.size - place.in_size - place.out_size),
    )
    a, b, more = theirs.split(sizes)
    pairs = ours.view(experts, place.size // experts)
    a_pairs, b_pairs, more_pairs = pairs.split([size // experts for size in sizes], dim=1)
    b_turned = b_pairs.unflatten(1, (place.format.rank, -1)).transpose(1, 2)
    b = b.view(b_turned.shape)
    more = more.view(more_pairs.shape)
    for mine, their in ((a_pairs, a.view(experts, -1)), (b_turned, b), (more_pairs, more)):
        if back:
            _move(their, mine)
        else:
            _move(mine, their)
    return target


def _move(target: Tensor, source: Tensor) -> None:
    """Copy with NumPy on this thread: synchronising torch's threads takes longer than copying a row."""
    bits = BITS[target.itemsize]
    np.copyto(target.view(bits).numpy(), source.to(target.dtype).view(bits).numpy())


def _tensor(payload: np.ndarray) -> Tensor:
    payload = np.ascontiguousarray(payload)
    if payload.dtype.itemsize == 1:
        payload = payload.view(np.uint8)
    if is_bfloat16(payload.dtype):
        return torch.from_numpy(payload.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(payload if payload.flags.writeable else payload.copy())


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(BFLOAT16)
    return tensor.numpy().copy()


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """Locations of an adapter's rows, and its extras. members: the adapters of a mix."""

    rows: dict[tuple[int, int], LoraRow]
    extras: dict[str, Extra]
    members: tuple[LoadedAdapter, ...] = ()


class Mixes:
    """The mixes of the last steps. An adapter's table is the same object in consecutive steps, by which
    operations recognise it.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[tuple[int, float], ...], LoadedAdapter] = OrderedDict()

    def find(self, members: Sequence[tuple[LoadedAdapter, float]]) -> LoadedAdapter:
        """members: several adapters that act together, each with the factor on its change of a layer; none of
        them has extras. Only tables are built: adapters are stored once for all their mixes. A single member
        with scale 1 is returned itself.
        """
        if len(members) == 1 and members[0][1] == 1:
            return members[0][0]
        key = tuple((id(one), scale) for one, scale in members)  # `members` keeps these objects alive
        found = self._known.get(key)
        if found is None:
            rows: dict[tuple[int, int], list[LoraRow]] = {}
            for one, scale in members:
                formats: dict[RowFormat, RowFormat] = {}
                for place, row in one.rows.items():
                    if row.format not in formats:
                        scaled = replace(row.format, scale=row.format.scale * scale, mixed=True)
                        formats[row.format] = scaled
                    rows.setdefault(place, []).append(replace(row, format=formats[row.format]))
            mixed = {place: replace(first, more=tuple(more)) for place, (first, *more) in rows.items()}
            found = self._known[key] = LoadedAdapter(mixed, {}, tuple(one for one, _ in members))
            if len(self._known) > MAX_MIXES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found


def lora_batch(pool: AdapterPool, segments: Iterable[tuple[int, int, LoadedAdapter]]) -> LoraBatch | None:
    """The batch for token rows [start, stop) and their adapters, ascending. None if there are none."""
    loaded = list(segments)
    if not loaded:
        return None
    return LoraBatch(
        pool.flat,
        tuple(LoraSegment(start, stop, one.rows) for start, stop, one in loaded),
        pool.geometry.page_width,  # the offset of every row is a multiple of this
        tuple(ExtraSegment(start, stop, one.extras) for start, stop, one in loaded if one.extras),
    )


def with_virtual(batch: LoraBatch | None, virtual: Sequence[tuple[int, int]]) -> LoraBatch | None:
    """The batch of a pass in which some rows are virtual tokens: (row, token number) pairs, ascending.

    Extras that no row needs are omitted, so that other passes run as without them.
    """
    if batch is None or not batch.extras:
        return batch
    extras = []
    for one in batch.extras:
        mine = [(row, number) for row, number in virtual if one.start <= row < one.stop]
        if mine:
            rows, numbers = (upload(part, torch.long, batch.pool.device) for part in zip(*mine, strict=True))
            extras.append(replace(one, virtual=(rows, numbers)))
        elif not all(map(is_virtual, one.values)):
            extras.append(one)
    return replace(batch, extras=tuple(extras))


@dataclass(frozen=True)
class StoreParts:
    """options: how files for this cache are read. largest_pages: of an adapter of the largest rank with all
    modules.
    """

    plan: CachePlan
    pool: AdapterPool
    rules: AdapterRules
    options: ReadOptions
    largest_pages: int


def build_parts(
    model: ModelConfig,
    config: LoraCacheConfig,
    device: torch.device,
    dtype: torch.dtype,
    free_bytes: int,
    base: BaseWeights | None,
    slicer: Slicer | None = None,
) -> StoreParts:
    """Size the levels and allocate them, as in `AdapterStore`. Raises ConfigError."""
    modules = held = lora_modules(model, config.target_modules)
    num_layers = model.num_layers
    agree: Callable[[int], int] = int
    if slicer is not None:  # held: the modules as this rank has them
        held = {number: slicer.modules[number] for number in modules if number in slicer.modules}
        num_layers, agree = slicer.num_layers, slicer.agree
    sizes = num_layers, config, dtype.itemsize, agree(free_bytes)
    try:
        plan = plan_cache(held.values(), *sizes)
    except ConfigError as error:
        if config.target_modules or model.moe is None:
            raise
        modules, held = beside_experts(modules), beside_experts(held)
        plan = plan_cache(held.values(), *sizes)
        logger.warning("adapters on routed experts are off: %s", error)
    # Everything on the device is also on the host: additional device pages could never be used.
    host, device_pages = agree(plan.host_pages), agree(plan.device_pages)
    plan = replace(plan, host_pages=host, device_pages=min(host, device_pages))
    native.load()  # now, so that the first adapter does not wait for the compiler
    pool = AdapterPool(plan.geometry, plan.host_pages, plan.device_pages, dtype, device)
    pages = pages_of_rank(plan.geometry, held.values(), num_layers, config.rank_limit)
    logger.info(
        "LoRA cache: host %d pages, device %d pages of %d bytes; adapters of rank %d with every module: "
        "%d on the host, %d on the device",
        plan.host_pages,
        plan.device_pages,
        pool.page_bytes,
        config.rank_limit,
        plan.host_pages // pages,
        plan.device_pages // pages,
    )
    rules = AdapterRules(modules, model.num_layers, config.rank_limit, dtype == torch.float16)
    largest = min(plan.host_pages, plan.device_pages) * plan.geometry.page_elements
    largest *= 1 if slicer is None else slicer.num_ranks
    bounds = Bounds.of(modules, model.num_layers, config.rank_limit, largest, pool.element_bytes)
    # Ranks that share each adapter have the matrices of each row apart.
    options = ReadOptions(modules, base, bounds, text_only=config.text_only, shared=slicer is None)
    return StoreParts(plan, pool, rules, options, pages)
