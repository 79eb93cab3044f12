"""Describes an adapter and whether a base model can serve it, for `manylora inspect`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from manylora.config.engine import LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import AdapterError, ConfigError
from manylora.lora.bounds import ANY_MODEL, Bounds
from manylora.lora.extras import with_extras
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.peft.settings import form_of, read_settings
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.sources import Source, find_source, read_lora, read_whole, source_dtype
from manylora.lora.geometry import Layout, cache_geometry, is_virtual
from manylora.lora.modules import FUSED, LoraModule, lora_modules, module_name
from manylora.lora.number_types import BY_NAME
from manylora.lora.rules import NOTHING, AdapterRules, check_shapes
from manylora.lora.tensors import Adapter, adapter_from_rows
from manylora.request import LoraExtra


@dataclass(frozen=True)
class BaseModel:
    """The model that an adapter is checked against: its directory, config.json and cache settings."""

    model_dir: Path
    config: ModelConfig
    cache: LoraCacheConfig


@dataclass
class AdapterReport:
    """The facts about an adapter, as far as they were found before `problem`. None: unknown."""

    kind: str | None = None  # npy, peft, nemo, llgtrt
    source: Path | None = None
    form: str | None = None  # PEFT type: LORA, LOHA and so on
    dtype: str | None = None  # the source's
    modules: dict[str, dict[int, int]] | None = None  # name -> layer -> rank
    num_dora: int = 0  # rows with a magnitude
    extras: tuple[LoraExtra, ...] = ()  # by name
    num_bytes: int | None = None  # in the source's type, without padding if row sizes are known
    digest: str | None = None
    cost: float | None = None  # see `token_cost`
    num_virtual: int = 0  # virtual tokens before each prompt
    num_pages: int | None = None
    page_bytes: int | None = None
    page_parts: int = 0  # it takes one of this many parts of a page; 0: whole pages
    shared_bytes: int = 0  # of matrices shared by adapters, and the pages of these
    shared_pages: Fraction = Fraction(0)
    notes: tuple[str, ...] = ()  # warnings: served, but maybe not as intended
    problem: str | None = None


def inspect_adapter(
    path: Path, base: BaseModel | None = None, *, allow_bin: bool = False, text_only: bool = False
) -> AdapterReport:
    """allow_bin, text_only: as in `ReadOptions`. Problems of the adapter or the base model are not raised:
    they are in `problem`."""
    report = AdapterReport()
    try:
        source = find_source(path)
        report.kind, report.source = source.kind, source.path
        if source.kind == "peft":
            report.form = form_of(read_settings(source.path))
        modules = lora_modules(base.config, base.cache.target_modules) if base else None
        bounds = Bounds.of_any_rank(modules, base.config.num_layers) if base and modules else ANY_MODEL
        weights_of_base = BaseWeights(base.model_dir) if base else None
        depth, notes = base.config.num_layers if base else None, list[str]()
        options = ReadOptions(
            modules,
            weights_of_base,
            bounds,
            allow_bin,
            text_only=text_only,
            num_layers=depth,
            shared=base is not None,
            tell=notes.append,
        )
        report.dtype = source_dtype(source, options)
        _read(report, source, base, options)
        report.notes = (*notes, *report.notes)
    except (AdapterError, ConfigError) as error:
        report.problem = str(error)
    except OSError as error:
        report.problem = f"{path} cannot be read: {error.strerror}"
    return report


def _read(report: AdapterReport, source: Source, base: BaseModel | None, options: ReadOptions) -> None:
    adapter: Adapter | None = None
    if source.kind in ("peft", "nemo"):
        found = read_whole(source, options)
        adapter = adapter_from_rows(found.rows, extras=found.extras)
        table = [(row.module_id, row.layer, row.format.rank, row.format.dora) for row in adapter.rows]
        _describe(report, table, adapter.extras)
        if base is not None:
            adapter = _rules(base).check_rows(found.rows, found.extras)
    else:
        lora = read_lora(source, 0, options)
        weights, config = check_shapes(lora)
        _describe(report, config.tolist(), lora.extras)
        report.num_bytes = weights.nbytes
        adapter = _rules(base).check(lora) if base is not None else None
    assert report.dtype is not None
    if base is not None and adapter is not None:
        _judge(report, base, adapter)
        report.notes = () if adapter.acts else (NOTHING,)
    if adapter is not None:
        report.digest = adapter.digest
        report.num_bytes = adapter.num_elements * BY_NAME[report.dtype].dtype.itemsize


def _describe(report: AdapterReport, rows: Iterable[Sequence[int]], extras: tuple[LoraExtra, ...]) -> None:
    """rows: module id, layer, rank, and optionally whether it is DoRA."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for module_id, layer, rank, *dora in rows:
        found[module_name(module_id)][layer] = rank
        report.num_dora += bool(dora and dora[0])
    report.modules = dict(found)
    report.extras = extras


def _rules(base: BaseModel) -> AdapterRules:
    model, cache = base.config, base.cache
    modules = lora_modules(model, cache.target_modules)
    return AdapterRules(modules, model.num_layers, cache.rank_limit, model.dtype == "float16")


def _judge(report: AdapterReport, base: BaseModel, adapter: Adapter) -> None:
    """Add the facts that depend on the cache: pages and cost, for one device."""
    model, cache, limit = base.config, base.cache, base.cache.rank_limit
    modules = lora_modules(model, cache.target_modules)
    optimal, largest = min(cache.optimal_adapter_size, limit), min(cache.max_adapter_size, limit)
    geometry = cache_geometry(modules.values(), model.num_layers, optimal, largest)
    item_bytes = BY_NAME[model.dtype].dtype.itemsize
    layout = Layout.of(adapter.shapes(modules), geometry, item_bytes)
    layout = with_extras(layout, adapter.extras, geometry)
    report.num_pages, report.num_virtual = layout.num_pages, layout.num_virtual
    report.page_parts = layout.need.parts
    report.shared_bytes = adapter.shared_bytes // 4 * item_bytes
    report.shared_pages = Fraction(0)
    for one in layout.need.shared.values():
        report.shared_pages += Fraction(one.pages, one.parts or 1)
    report.cost = token_cost(adapter, modules, model.num_layers)
    report.page_bytes = geometry.page_elements * item_bytes


def token_cost(adapter: Adapter, modules: Mapping[int, LoraModule], num_layers: int) -> float:
    """Multiplications per generated token, as a share of those of the base model's adaptable matrices. For
    routed experts, both are of one expert.
    """
    layers = {one.name: num_layers if one.layers is None else len(one.layers) for one in modules.values()}
    sizes = {one.name: one.in_dim // one.experts * (one.out_dim // one.experts) for one in modules.values()}
    base = sum(
        form.in_dim // one.experts * (form.out_dim // one.experts) * count
        for one in modules.values()
        if one.counted
        for form, count in one.forms(layers[one.name])
    )
    own = ((row, modules[row.module_id].at(row.layer)) for row in adapter.rows)
    count = sum(
        (module.row_elements(row.format) + (row.shared.values.size if row.shared else 0)) / module.experts
        for row, module in own
    )
    for extra in adapter.extras:
        owner, _, part = extra.name.rpartition(".")
        if not is_virtual(extra.name) and not owner.startswith("embed"):
            count += extra.values.size
        if part.startswith("input_"):  # of modules in one matrix that once more
            name = owner.rpartition(".")[2]
            count += sum(sizes.get(whole, 0) for whole, parts in FUSED.items() if name in (whole, *parts))
    return count / base
