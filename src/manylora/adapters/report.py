"""Describes an adapter and whether a base model can serve it, for `manylora inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.adapters.extras import with_extras
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.peft.settings import form_of, read_settings
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import Source, find_source, read_lora, read_whole, source_dtype
from manylora.adapters.geometry import Layout, geometry_of, is_virtual
from manylora.adapters.modules import FUSED, LoraModule, lora_modules, module_name
from manylora.adapters.number_types import BY_NAME
from manylora.adapters.rules import NOTHING, AdapterRules, check_shapes
from manylora.adapters.tensors import Adapter, adapter_from_rows
from manylora.config.engine import LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import AdapterError, ConfigError
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

    kind: str | None = None  # as of `Source`
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
        if source.in_peft:
            report.form = form_of(read_settings(source.path))
        notes = list[str]()
        options = ReadOptions(allow_bin=allow_bin, text_only=text_only, shared=False, tell=notes.append)
        if base is not None:
            modules, depth = lora_modules(base.config, base.cache.target_modules), base.config.num_layers
            bounds = Bounds.of_any_rank(modules, depth) if modules else ANY_MODEL
            weights = BaseWeights(base.model_dir)
            options = replace(
                options, modules=modules, base=weights, bounds=bounds, num_layers=depth, shared=True
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
    rules = adapter = None
    if base is not None and options.modules is not None:
        half = base.config.dtype == "float16"
        rules = AdapterRules(options.modules, base.config.num_layers, base.cache.rank_limit, half)
    if source.has_rows:
        found = read_whole(source, options)
        adapter = adapter_from_rows(found.rows, extras=found.extras)
        rows = [[row.module_id, row.layer, row.format.rank, row.format.dora] for row in adapter.rows]
        report.extras = adapter.extras
    else:
        lora = read_lora(source, 0, options)
        weights, config = check_shapes(lora)
        rows, report.extras, report.num_bytes = config.tolist(), lora.extras, weights.nbytes
    report.modules = {}
    for module_id, layer, rank, *dora in rows:
        report.modules.setdefault(module_name(module_id), {})[layer] = rank
        report.num_dora += bool(dora and dora[0])
    if rules is not None and base is not None:
        adapter = rules.check(lora) if adapter is None else rules.check_rows(found.rows, found.extras)
        _add_costs(report, base, rules.modules, adapter)
        report.notes = () if adapter.acts else (NOTHING,)
    if adapter is not None and report.dtype is not None:
        report.digest = adapter.digest
        report.num_bytes = adapter.num_elements * BY_NAME[report.dtype].dtype.itemsize


def _add_costs(
    report: AdapterReport, base: BaseModel, modules: Mapping[int, LoraModule], adapter: Adapter
) -> None:
    num_layers = base.config.num_layers
    geometry = geometry_of(modules.values(), num_layers, base.cache)
    item_bytes = BY_NAME[base.config.dtype].dtype.itemsize
    layout = Layout.of(adapter.shapes(modules), geometry, item_bytes)
    layout = with_extras(layout, adapter.extras, geometry)
    report.num_pages, report.num_virtual = layout.num_pages, layout.num_virtual
    report.page_parts = layout.need.parts
    report.shared_bytes = adapter.shared_bytes // 4 * item_bytes
    shared = layout.need.shared.values()
    report.shared_pages = sum((Fraction(one.pages, one.parts or 1) for one in shared), Fraction(0))
    report.cost = token_cost(adapter, modules, num_layers)
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
