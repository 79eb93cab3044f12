"""StoreParts: the components of an AdapterStore, sized for one model and device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manylora.adapters.bounds import Bounds
from manylora.adapters.cache.pool import AdapterPool
from manylora.adapters.catalog.files import AdapterFolders
from manylora.adapters.catalog.levels import DiskLevel
from manylora.adapters.catalog.library import AdapterLibrary
from manylora.adapters.catalog.names import read_names
from manylora.adapters.catalog.reader import AdapterReader
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import KnownLayouts, ReadOptions
from manylora.adapters.geometry import CachePlan, pages_of_rank, plan_cache
from manylora.adapters.modules import LoraModule, beside_experts, lora_modules
from manylora.adapters.rules import AdapterRules
from manylora.adapters.slicing import Slicer
from manylora.config.engine import LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.kernels import native

logger = logging.getLogger("manylora")


@dataclass(frozen=True)
class StoreParts:
    """bounds: of what the cache can hold. max_device_adapters: of the largest rank with all modules,
    `largest_pages` pages each. text_only: as in `ReadOptions`. in_parts: ranks share each adapter, so none is
    read directly into its pages, and each row has its own matrices.
    """

    plan: CachePlan
    pool: AdapterPool
    rules: AdapterRules
    bounds: Bounds
    base: BaseWeights | None
    max_device_adapters: int
    largest_pages: int
    text_only: bool = False
    in_parts: bool = False

    def reader(
        self, modules: Mapping[int, LoraModule], roots: Sequence[Path] | None = None, narrow: bool = True
    ) -> AdapterReader:
        """Reads files for this store. modules: in the order of the files. roots: as in `Bounds`. narrow: rows
        may be narrowed to the pages' dtype.
        """
        pages = self.pool.dtype_name
        options = ReadOptions(
            modules,
            self.base,
            self.bounds.within(roots),
            bfloat16=narrow and pages == "bfloat16",
            text_only=self.text_only,
            shared=not self.in_parts,
            layouts=KnownLayouts(),
        )
        return AdapterReader(self.rules, options, "" if self.in_parts else pages)

    def library(self, config: LoraCacheConfig) -> AdapterLibrary:
        """The library of the folders named in the settings. Raises ConfigError."""
        on_disk = config.disk_cache_dir is not None
        disk = DiskLevel(config.disk_cache_bytes if on_disk else 0, config.disk_cache_dir)
        names = read_names(config.names_file) if config.names_file is not None else {}
        if config.catalog_dir is not None and not config.catalog_dir.is_dir():
            raise ConfigError(f"lora_catalog_dir {config.catalog_dir} is not a directory")
        reader = self.reader(self.rules.modules, (*config.roots, *names.values()))
        return AdapterLibrary(reader, disk, AdapterFolders(names, config.catalog_dir))


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
    on_device = plan.device_pages // pages
    logger.info(
        "LoRA cache: host %d pages, device %d pages of %d bytes; adapters of rank %d with every module: "
        "%d on the host, %d on the device",
        plan.host_pages,
        plan.device_pages,
        pool.page_bytes,
        config.rank_limit,
        plan.host_pages // pages,
        on_device,
    )
    rules = AdapterRules(modules, model.num_layers, config.rank_limit, dtype == torch.float16)
    largest = min(plan.host_pages, plan.device_pages) * plan.geometry.page_elements
    largest *= 1 if slicer is None else slicer.num_ranks
    bounds = Bounds.of(modules, model.num_layers, config.rank_limit, largest, pool.element_bytes)
    return StoreParts(
        plan=plan,
        pool=pool,
        rules=rules,
        bounds=bounds,
        base=base,
        max_device_adapters=on_device,
        largest_pages=pages,
        text_only=config.text_only,
        in_parts=slicer is not None,
    )
