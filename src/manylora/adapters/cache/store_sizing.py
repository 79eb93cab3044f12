"""StoreParts: the components of an AdapterStore, sized for one model and device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from manylora.adapters.bounds import Bounds
from manylora.adapters.cache.pool import AdapterPool
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.geometry import CachePlan, pages_of_rank, plan_cache
from manylora.adapters.modules import beside_experts, lora_modules
from manylora.adapters.rules import AdapterRules
from manylora.adapters.slicing import Slicer
from manylora.config.engine import LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.kernels import native

logger = logging.getLogger("manylora")


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
