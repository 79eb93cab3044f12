"""Page geometry of the adapter cache, computed as in TensorRT-LLM, and the layout of an adapter in its pages.

A slot is `page_width` elements, a page is `slots_per_page` slots. A row (layer, module) of an adapter takes
whole slots of one page. A page belongs to one adapter, or in equal parts to several adapters that share
matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from manylora.adapters.modules import LoraModule
from manylora.adapters.pages import Need
from manylora.config.engine import LoraCacheConfig
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.kernels.row_format import RowFormat
from manylora.request import INVOCATION

REMEDIES = {
    "host": "raise lora_cache_host_memory_bytes",
    "device": "raise lora_cache_gpu_memory_fraction",
}


@dataclass(frozen=True)
class CacheGeometry:
    """page_width in elements. min_total_slots hold one adapter of the largest rank."""

    page_width: int
    slots_per_page: int
    min_total_slots: int
    widest: int  # slots of a rank-1 row of the widest module

    @property
    def page_elements(self) -> int:
        return self.page_width * self.slots_per_page

    def slots_for(self, num_bytes: int, element_bytes: int, module_layers: int = 0) -> int:
        """Slots of a cache level, from rank-1 rows if `module_layers` > 0, otherwise from bytes."""
        if module_layers > 0:
            return module_layers * self.widest
        return num_bytes // (self.page_width * element_bytes)

    def pages_for(self, level: str, num_slots: int, *, at_most: bool = False) -> int:
        """Slots rounded up to pages. at_most: rounded down, for a limit in bytes. Raises ConfigError if not
        even one largest adapter fits.
        """
        if at_most:
            num_slots -= num_slots % self.slots_per_page
        if num_slots < self.min_total_slots:
            raise ConfigError(
                f"Not enough space allocated to {level} LoRA cache to hold 1 max sized LoRA "
                f"{num_slots} < {self.min_total_slots} slots of {self.page_width} elements; "
                f"{REMEDIES[level]}, lower lora_cache_max_adapter_size or name fewer lora_target_modules"
            )
        return _ceil(num_slots, self.slots_per_page)


def cache_geometry(
    modules: Iterable[LoraModule], num_layers: int, optimal_rank: int, max_rank: int
) -> CacheGeometry:
    """Geometry from the modules of one rank. `num_layers`: on this pipeline rank.

    page_width = min over counted modules of in + out. slots_per_page = the slots of an adapter of the optimal
    rank, but at least those of one row of the largest rank, including modules that are not counted.
    """
    modules = tuple(modules)
    forms = [form for m in modules if m.counted for form in m.forms(num_layers)]
    sizes = [(m.in_dim + m.out_dim, layers) for m, layers in forms]
    width = min(size for size, _ in sizes)
    total = sum(layers * optimal_rank * _ceil(size, width) for size, layers in sizes)
    least = max(_ceil(m.row_elements(RowFormat(max_rank)), width) for m in modules)
    return CacheGeometry(
        page_width=width,
        slots_per_page=max(total, least),
        min_total_slots=_ceil(max_rank * sum(layers * size for size, layers in sizes), width),
        widest=_ceil(max(size for size, _ in sizes), width),
    )


def geometry_of(modules: Iterable[LoraModule], num_layers: int, config: LoraCacheConfig) -> CacheGeometry:
    """`cache_geometry` with the ranks of the settings."""
    limit = config.rank_limit
    optimal, largest = min(config.optimal_adapter_size, limit), min(config.max_adapter_size, limit)
    return cache_geometry(modules, num_layers, optimal, largest)


@dataclass(frozen=True)
class CachePlan:
    geometry: CacheGeometry
    host_pages: int
    device_pages: int

    def adapters_of_rank(self, modules: Iterable[LoraModule], num_layers: int, rank: int) -> tuple[int, int]:
        """How many adapters of this rank, with all counted modules, fit host and device."""
        pages = pages_of_rank(self.geometry, modules, num_layers, rank)
        return self.host_pages // pages, self.device_pages // pages


def pages_of_rank(geometry: CacheGeometry, modules: Iterable[LoraModule], num_layers: int, rank: int) -> int:
    """Pages of an adapter of this rank with all counted modules."""
    row, counted = RowFormat(rank), [module for module in modules if module.counted]
    places = ((module, layer) for module in counted for layer in range(num_layers) if module.is_on(layer))
    return place_rows([RowShape(one.at(layer), layer, row) for one, layer in places], geometry)[1]


def usual_bytes(
    modules: Iterable[LoraModule],
    num_layers: int,
    config: LoraCacheConfig,
    element_bytes: int,
    num_adapters: int,
) -> int:
    """Bytes of `num_adapters` of the optimal rank and one of the largest, with all counted modules."""
    modules, limit = tuple(modules), config.rank_limit
    optimal, geometry = min(config.optimal_adapter_size, limit), geometry_of(modules, num_layers, config)
    ranks = ((optimal, num_adapters), (limit, 1))
    pages = sum(count * pages_of_rank(geometry, modules, num_layers, rank) for rank, count in ranks)
    least = _ceil(geometry.min_total_slots, geometry.slots_per_page)
    return max(pages, least) * geometry.page_elements * element_bytes


def plan_cache(
    modules: Iterable[LoraModule],
    num_layers: int,
    config: LoraCacheConfig,
    element_bytes: int,
    free_bytes: int,
) -> CachePlan:
    """Size both levels. free_bytes: of the device, after weights and KV cache; the device level takes its
    fraction of these. Raises ConfigError if a level cannot hold one adapter of the largest rank.
    """
    modules, limit = tuple(modules), config.rank_limit
    geometry = geometry_of(modules, num_layers, config)
    device_bytes = config.gpu_memory_bytes
    if device_bytes is None:
        device_bytes = int(config.gpu_memory_fraction * free_bytes)
    adapter_rows = limit * num_layers * sum(module.counted for module in modules)
    host_rows = adapter_rows * (config.max_cpu_loras or 0) or config.num_host_module_layer
    device_rows = adapter_rows * (config.max_loras or 0) or config.num_device_module_layer
    host = geometry.slots_for(config.host_memory_bytes, element_bytes, host_rows)
    device = geometry.slots_for(device_bytes, element_bytes, device_rows)
    if not config.sizes_host:  # the host level holds what the device level holds
        host = max(host, device)
    return CachePlan(
        geometry,
        geometry.pages_for("host", host, at_most=not host_rows),
        geometry.pages_for("device", device, at_most=not device_rows),
    )


class RowShape(NamedTuple):
    """A row to be laid out. key: identifies the matrices of a shared row."""

    module: LoraModule
    layer: int
    format: RowFormat
    key: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one row is stored: page (counted within the adapter), slot, and its sizes in numbers and slots.

    size: of the whole row, in_size: of A, out_size: of B. experts: > 1: a row of a routed-expert module, with
    this many pairs of matrices. key: of a shared row's matrices, which are stored elsewhere.
    """

    page: int
    slot: int
    size: int
    in_size: int
    out_size: int
    module_id: int
    layer: int
    format: RowFormat
    num_slots: int
    experts: int = 1
    key: str = ""


def is_virtual(name: str) -> bool:
    """Whether an extra of this name is there only for virtual tokens."""
    return name == "prompt.weight" or ".prefix." in name


@dataclass(frozen=True, slots=True)
class ExtraPiece:
    """`rows` rows of an extra, starting at this slot of this page (counted within the adapter)."""

    page: int
    slot: int
    rows: int


@dataclass(frozen=True, slots=True)
class ExtraPlace:
    """Where an extra [rows, columns] is stored; a vector has one column. All pieces except the last have the
    same number of rows.
    """

    name: str
    columns: int
    pieces: tuple[ExtraPiece, ...]
    is_matrix: bool
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of an adapter in its pages: its placements, and the number of used slots per page.

    shared: layouts of its shared rows' matrices in pages of their own, by key. page_slots: slots of the page
    of which it may be a part; 0: its pages are its own.
    """

    placements: tuple[Placement, ...]
    used_slots: tuple[int, ...]
    extras: tuple[ExtraPlace, ...] = ()
    shared: Mapping[str, Layout] = field(default_factory=dict)
    page_slots: int = 0

    @classmethod
    def of(cls, rows: Iterable[RowShape], geometry: CacheGeometry, element_bytes: int = 1) -> Layout:
        """Lay out rows as `place_rows` does. Raises AdapterInvalidError."""
        rows = list(rows)
        placements, num_pages = place_rows(rows, geometry, element_bytes=element_bytes)
        used = [0] * num_pages
        for place in placements:
            used[place.page] = place.slot + place.num_slots
        whole = {row.key: row for row in rows if row.format.shared}
        if not whole:
            return cls(placements, tuple(used))
        slots, shared = geometry.slots_per_page, {}
        for key, row in whole.items():
            matrices = row._replace(format=row.format.matrices, key="")
            shared[key] = replace(cls.of([matrices], geometry, element_bytes), page_slots=slots)
        return cls(placements, tuple(used), shared=shared, page_slots=slots)

    @property
    def num_pages(self) -> int:
        return len(self.used_slots)

    @property
    def rank(self) -> int:
        """The largest of its rows; 0: it has none."""
        return max((place.format.rank for place in self.placements), default=0)

    @property
    def need(self) -> Need:
        """The space it takes of a level. Parts of a page are powers of two: few different sizes."""
        shared = {key: one.need for key, one in self.shared.items()}
        most = self.page_slots // max(1, self.used_slots[0]) if self.num_pages == 1 else 0
        parts = 1 << most.bit_length() >> 1
        if parts < 2:
            return Need(self.num_pages, shared=shared)
        return Need(1, parts, self.page_slots // parts, shared)

    @property
    def num_virtual(self) -> int:
        """Number of virtual tokens that the adapter puts before each prompt."""
        virtual = (place for place in self.extras if is_virtual(place.name))
        return max((sum(piece.rows for piece in place.pieces) for place in virtual), default=0)

    @property
    def invocation(self) -> tuple[int, ...]:
        """As in `LoraInput`."""
        return next((place.token_ids for place in self.extras if place.name == INVOCATION), ())


def place_rows(
    rows: Iterable[RowShape], geometry: CacheGeometry, element_bytes: int = 1
) -> tuple[tuple[Placement, ...], int]:
    """Placements of rows in order, and the number of pages they take (at least 1). element_bytes: of the
    pages' type, on which encoded rows depend. Raises AdapterInvalidError for a row larger than a page.
    """
    page = slot = 0
    placed: list[Placement] = []
    for module, layer, row, key in rows:
        sizes = module.row_sizes(row)
        size = sum(sizes)
        count = _ceil(size, geometry.page_width * row.numbers_per_element(element_bytes))
        if count > geometry.slots_per_page:
            raise AdapterInvalidError(
                f"Invalid low_rank ({row.rank}): a row of {module.name} takes {count} slots, a page of the "
                f"LoRA cache has {geometry.slots_per_page}; serve with a larger lora_cache_max_adapter_size"
            )
        if slot + count > geometry.slots_per_page:
            page, slot = page + 1, 0
        lies = page, slot, size, *sizes[:2]
        placed.append(Placement(*lies, module.module_id, layer, row, count, module.experts, key))
        slot += count
    return tuple(placed), page + 1


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
