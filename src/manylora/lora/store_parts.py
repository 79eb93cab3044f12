"""StoreParts: what an AdapterStore is made of, sized for one model and device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manylora.config.engine import LoraCacheConfig, ModelConfig
from manylora.errors import ConfigError
from manylora.kernels import native
from manylora.lora.bounds import Bounds
from manylora.lora.expert_rules import beside_experts
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.geometry import CachePlan, plan_cache
from manylora.lora.library.disk import DiskLevel
from manylora.lora.library.library import AdapterLibrary
from manylora.lora.library.names import read_names
from manylora.lora.library.reader import AdapterReader
from manylora.lora.modules import LoraModule, lora_modules
from manylora.lora.pool import AdapterPool
from manylora.lora.rules import AdapterRules
from manylora.lora.slicing import Slicer

logger = logging.getLogger("manylora")


@dataclass(frozen=True)
class StoreParts:
    """bounds: of what the cache can hold. max_device_adapters: of the largest rank, with every module.
    text_only: as of `ReadOptions`."""

    plan: CachePlan
    pool: AdapterPool
    rules: AdapterRules
    bounds: Bounds
    base: BaseWeights | None
    max_device_adapters: int
    text_only: bool = False

    def reader(
        self, modules: Mapping[int, LoraModule], roots: Sequence[Path] | None = None, narrow: bool = True
    ) -> AdapterReader:
        """Reads files for this store. modules: as they are in the files. roots: as of `Bounds`. narrow: rows
        may lose what the type of the pages does not hold."""
        pages = self.pool.dtype_name
        narrow = narrow and pages == "bfloat16"
        bounds = self.bounds.within(roots)
        options = ReadOptions(modules, self.base, bounds, bfloat16=narrow, text_only=self.text_only)
        return AdapterReader(self.rules, options, pages)

    def library(self, config: LoraCacheConfig) -> AdapterLibrary:
        """Of the folders that the settings name. Raises ConfigError."""
        on_disk = config.disk_cache_dir is not None
        disk = DiskLevel(config.disk_cache_bytes if on_disk else 0, config.disk_cache_dir)
        names = read_names(config.names_file) if config.names_file is not None else {}
        library = AdapterLibrary(self.reader(self.rules.modules, (*config.roots, *names.values())), disk)
        library.open_names(names)
        if config.catalog_dir is not None:
            library.open(config.catalog_dir)
        return library


def build_parts(
    model: ModelConfig,
    config: LoraCacheConfig,
    device: torch.device,
    dtype: torch.dtype,
    free_bytes: int,
    base: BaseWeights | None,
    slicer: Slicer | None = None,
) -> StoreParts:
    """Size the levels and allocate them. As `AdapterStore.open`. Raises ConfigError."""
    modules, plan = _plan(model, config, dtype, free_bytes, slicer)
    native.load()  # not with the first adapter, which would wait for the compiler
    pool = AdapterPool(plan.geometry, plan.host_pages, plan.device_pages, dtype, device)
    held = (modules, model.num_layers) if slicer is None else (slicer.modules, slicer.num_layers)
    on_host, on_device = plan.adapters_of_rank(held[0].values(), held[1], config.rank_limit)
    logger.info(
        "LoRA cache: host %d pages, device %d pages of %d bytes; adapters of rank %d with every module: "
        "%d on the host, %d on the device",
        plan.host_pages,
        plan.device_pages,
        pool.page_bytes,
        config.rank_limit,
        on_host,
        on_device,
    )
    rules = AdapterRules(modules, model.num_layers, config.rank_limit, dtype == torch.float16)
    largest = min(plan.host_pages, plan.device_pages) * plan.geometry.page_elements
    largest *= 1 if slicer is None else slicer.num_ranks
    bounds = Bounds.of(modules, model.num_layers, config.rank_limit, largest, pool.element_bytes)
    return StoreParts(plan, pool, rules, bounds, base, on_device, config.text_only)


def _plan(
    model: ModelConfig,
    config: LoraCacheConfig,
    dtype: torch.dtype,
    free_bytes: int,
    slicer: Slicer | None,
) -> tuple[Mapping[int, LoraModule], CachePlan]:
    modules = lora_modules(model, config.target_modules)
    if slicer is not None:
        sizes = slicer.num_layers, config, dtype.itemsize, slicer.agree(free_bytes)
        plan = plan_cache(slicer.modules.values(), *sizes)
        host = slicer.agree(plan.host_pages)
        return modules, replace(
            plan, host_pages=host, device_pages=min(host, slicer.agree(plan.device_pages))
        )
    sizes = model.num_layers, config, dtype.itemsize, free_bytes
    try:
        plan = plan_cache(modules.values(), *sizes)
    except ConfigError as error:
        if config.target_modules or model.moe is None:
            raise
        modules = beside_experts(modules)
        plan = plan_cache(modules.values(), *sizes)
        logger.warning("adapters on routed experts are off: %s", error)
    # What is on the device is on the host too: more pages there could never be used.
    return modules, replace(plan, device_pages=min(plan.host_pages, plan.device_pages))
